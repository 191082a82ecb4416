"""DFlash as a method of training."""

from runtime.dflash.settings import DFlashConfig


class DFlash:
    """Trains a drafter that fills a block of tokens in one pass."""

    name = "dflash"
    config_type = DFlashConfig


METHOD = DFlash()
