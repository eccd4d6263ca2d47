"""Where the services of a fleet are, as people write it down. Pure."""

from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(frozen=True)
class EncoderAddress:
    """The two ZMQ addresses of one encoder. Gateways connect to both, decoders to the data address alone."""

    control: str
    data: str

    @classmethod
    def parse(cls, text: str) -> "EncoderAddress":
        """From `CONTROL,DATA`; raises ConfigError."""
        control, _, data = text.partition(",")
        if not control or not data or "," in data:
            raise ConfigError(
                f"--encoders {text!r} must be two addresses, CONTROL,DATA, such as tcp://host:7101,tcp://host:7102"
            )
        return cls(control, data)
