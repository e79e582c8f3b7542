"""Configuration: one frozen dataclass per service; each field is a flag, a YAML key and an environment variable.

`--max-num-seqs 64`, `max-num-seqs: 64` in the file given by `--config` and `PAGEWIRE_MAX_NUM_SEQS=64` mean the
same. Precedence: flag, environment, file, then the default stated here. `pagewire.flags` does the parsing. Values that
are discovered at run time (block count, model length) are never written back.

Each service has a file; `shared.py` has the flags that several services share, `serve.py` those of the stack.
"""

from pagewire.config.executor import ExecutorConfig
from pagewire.config.gateway import GatewayConfig
from pagewire.config.ray import RayExecutorsConfig
from pagewire.config.scheduler import SchedulerConfig
from pagewire.config.serve import SET_BY_STACK, ServeConfig
from pagewire.config.shared import (
    DEFAULT_MODEL,
    WITHOUT_TLS,
    BatchConfig,
    ListenConfig,
    ModelConfigFlags,
    PublicListenConfig,
    RecoveryConfig,
    ServiceConfig,
    TlsConfig,
)
from pagewire.config.tokenizer import TokenizerConfig

__all__ = [
    "DEFAULT_MODEL",
    "SET_BY_STACK",
    "WITHOUT_TLS",
    "BatchConfig",
    "ExecutorConfig",
    "GatewayConfig",
    "ListenConfig",
    "ModelConfigFlags",
    "PublicListenConfig",
    "RayExecutorsConfig",
    "RecoveryConfig",
    "SchedulerConfig",
    "ServeConfig",
    "ServiceConfig",
    "TlsConfig",
    "TokenizerConfig",
]
