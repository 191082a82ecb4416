"""The command line and its verbs; ``maskgen.border`` says how each of them ends.

Results go to stdout, everything else to stderr. Nothing here imports torch; a verb does when it
runs.
"""

import click

from maskgen import verbs_build, verbs_masks, verbs_versions


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Build FlexAttention masks ahead of training, check them, and ship them.

    Exit codes: 0 done, 1 failed, 2 usage or spec, 3 verification found a difference.
    """


for verb in (*verbs_build.VERBS, *verbs_masks.VERBS, *verbs_versions.VERBS):
    main.add_command(verb)
