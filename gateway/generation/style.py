"""The parts of all answers that the operator's flags set."""

from dataclasses import dataclass

from pagewire.config import GatewayConfig
from pagewire.gateway.core.app_state import AppState


@dataclass(frozen=True)
class AnswerStyle:
    """The flags for usage and fingerprints."""

    forces_usage: bool = False  # streams contain it in each chunk, whether or not the request asks for it
    has_metrics: bool = False  # answers contain the times of their generation
    fingerprint_mode: str = "full"
    fingerprint_value: str | None = None

    @classmethod
    def of(cls, config: GatewayConfig) -> "AnswerStyle":
        """Returns the style that flags ask for, which have been checked."""
        return cls(
            config.enable_force_include_usage,
            config.enable_per_request_metrics,
            config.fingerprint_mode,
            config.fingerprint_value,
        )

    def fingerprint(self, weights_version: str | None) -> str | None:
        """Returns the `system_fingerprint` of an answer."""
        if self.fingerprint_mode in ("custom", "none"):
            return self.fingerprint_value
        return weights_version


STYLE = AppState[AnswerStyle]("style")
