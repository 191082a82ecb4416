"""Static-graph training over prebuilt masks: of drafters, and of models on packed documents."""

from flex_mask_compiler import hidden

if (_sentence := hidden("maskgen")) is not None:
    # By the name of this package `python -m` knows it, and ends in one line.
    raise ImportError(_sentence, name=__name__)
