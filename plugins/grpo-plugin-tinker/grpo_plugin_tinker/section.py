"""The section ``tinker``: the service, and how it is used."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, gt


@frozen(kw_only=True)
class TinkerConfig:
    """A service with Tinker's protocol trains and samples; the variable `TINKER_API_KEY` has its key."""

    base_url: str = ""
    """Address of the service, as in `http://127.0.0.1:8000`.  Empty: that of the variable `TINKER_BASE_URL`,
    or else Thinking Machines' service."""
    unavailable_for: float = field(default=900.0, validator=gt(0))
    """Seconds for which the service may be unavailable; after that the run ends, and can be resumed."""
    snapshots: int = field(default=8, validator=ge(2))
    """Number of snapshots of the weights that the service keeps for sampling; older ones are deleted."""
    server: Literal["tinker", "skyrl-jax"] = "tinker"
    """The service's program, where programs differ.  "tinker" adds up the losses of a request's tokens, and a
    snapshot stays as it is.  SkyRL's JAX backend ("skyrl-jax") takes means over a row's tokens and over the
    rows, so that advantages are scaled; and it loads a snapshot over the weights that are trained, so that a
    second model takes each version from the first one and is sampled from."""
    canary: bool = True
    """Compare logprobs of the service's sampler and trainer after each step.  It costs 48 samples of one
    token and one forward pass of short rows."""
