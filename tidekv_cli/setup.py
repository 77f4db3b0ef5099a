"""Where and how a request is carried out: device, profile, settled choice. Knows no document and no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidekv_cli.device import Device, detect_device
from tidekv_cli.fitting import Fitter
from tidekv_cli.model_spec import ModelSpec
from tidekv_cli.plan import PlanSettings
from tidekv_cli.profile import Profile, find_profile
from tidekv_cli.request import EngineChoice, RunRequest, check_budget, choose_settings, first_given
from tidekv_cli.sources import cache_directory
from tidekv_cli.units import parse_bytes

_PROFILE_OF_KIND = {"cpu": "cpu", "cuda": "generic-cuda"}


@dataclass(frozen=True, slots=True)
class Setup:
    """What a request comes to on this machine; `limit_bytes` is what the user wants to be all there is."""

    device: Device
    profile: Profile
    choice: EngineChoice
    limit_bytes: int | None
    plans: Path

    @property
    def free_bytes(self) -> int | None:
        """What may be used: free memory, or the limit if that is less; None where neither is known."""
        known = [amount for amount in (self.device.free_bytes, self.limit_bytes) if amount is not None]
        return min(known, default=None)

    @property
    def ceiling_bytes(self) -> int | None:
        """What live tensors may take at most where the user set a limit: the limit less what they do not show."""
        return None if self.limit_bytes is None else self.limit_bytes - sum(self.profile.reserve.values())

    def plan_settings(self, spec: ModelSpec, config: Mapping[str, Any], record_kept: bool = False) -> PlanSettings:
        """As chosen, before anything is lowered to make it fit."""
        choice = self.choice
        return PlanSettings(
            spec=spec,
            method=choice.method,
            dtype=choice.dtype,
            chunk_size=choice.chunk_size,
            score_block=choice.score_block,
            budget_tokens=choice.budget if isinstance(choice.budget, int) else None,
            selector_settings=choice.selector_settings,
            max_new_tokens=choice.max_new_tokens,
            attention=choice.attention,
            reserve_items=self.profile.reserve,
            free_bytes=self.free_bytes,
            config=config,
            device_kind=self.device.kind,
            record_kept=record_kept,
        )

    def fitter(self) -> Fitter:
        """Plans under this choice. Raises `UsageError` for a budget below what the selector always keeps."""
        selector = self.choice.selector.build(self.choice.selector_settings)
        check_budget(self.choice, selector.mandatory_tokens)
        return Fitter(self.choice, selector.mandatory_tokens, self.plans)


def set_up(request: RunRequest, config: Mapping[str, Any], environ: Mapping[str, str]) -> Setup:
    """Settle everything that needs neither document nor model. Raises `UsageError` and `DeviceError`."""
    device = detect_device(first_given(request.device, config.get("device"), "auto"))
    profile = find_profile(first_given(request.profile, config.get("profile"), _PROFILE_OF_KIND[device.kind]), environ)
    choice = choose_settings(request, config, profile, device.kind)
    limit = None if request.memory_limit is None else parse_bytes(request.memory_limit, "--memory-limit")
    return Setup(device, profile, choice, limit, cache_directory(environ) / "plans")
