"""What a learner will need and this machine may lack, looked at before anything starts. No torch here.

Called by `engine.serve` (also for `--dry-run`) and by `learner.train` before it asks for the engine. Whether there is a
CUDA device, only torch can say: the learner looks at that.
"""

from importlib.util import find_spec

from configs.load import ConfigError
from configs.model_folder import check_model
from configs.root import Config


def check_learner(config: Config) -> None:
    """Refuse a reference that is not there, and a library that is not installed.

    Raises:
        ModelError: `loss.kl.reference` is no model.
        ConfigError: `learner.backend` or `lora.rank` needs a package that is missing.
    """
    if config.learner.kind != "torch":
        return
    if config.loss.kl.weight and config.loss.kl.reference:
        check_model(config.loss.kl.reference, "loss.kl.reference")
    if config.learner.backend == "deepspeed" and find_spec("deepspeed") is None:
        raise ConfigError(
            'learner.backend = "deepspeed" needs that package: pip install "adastream[deepspeed]"; allowed: torch'
        )
    if config.lora.rank and find_spec("peft") is None:
        raise ConfigError(f'lora.rank must be 0 without peft, got {config.lora.rank} (pip install "adastream[lora]")')
