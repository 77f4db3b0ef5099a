"""Where and how a request is carried out: device, profile, settled choice. Knows no document and no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tidekv_cli import machine
from tidekv_cli.architectures import check_slots
from tidekv_cli.attention_choice import ChosenAttention, choose_attention
from tidekv_cli.device import Device, detect_device, detect_devices
from tidekv_cli.errors import DeviceError, UsageError
from tidekv_cli.fitting import Fitter
from tidekv_cli.model_spec import ModelSpec
from tidekv_cli.plan_settings import PlanSettings, Rates
from tidekv_cli.profile import Profile, find_profile, list_profiles, match_profile
from tidekv_cli.request import EngineChoice, RunRequest, check_budget, choose_settings, first_given
from tidekv_cli.sources import cache_directory
from tidekv_cli.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Setup:
    """What a request comes to; `limit_bytes` is what the user wants to be all there is.

    `elsewhere` if the device is not here; `plans` is where simulated figures are kept; `warnings` say what was chosen
    against what one would expect; `held_bytes` are taken on the device by what a plan counts itself.
    """

    device: Device
    profile: Profile
    choice: EngineChoice
    limit_bytes: int | None
    elsewhere: bool
    plans: Path
    machine: machine.Machine = field(repr=False)  # it holds the process's environment
    warnings: tuple[str, ...] = ()
    held_bytes: int = 0

    @property
    def free_bytes(self) -> int | None:
        """What may be used: free memory, or the limit if that is less; None where neither is known."""
        free = self.device.free_bytes
        free = None if free is None else free + self.held_bytes
        known = [amount for amount in (free, self.limit_bytes) if amount is not None]
        return min(known, default=None)

    @property
    def ceiling_bytes(self) -> int | None:
        """What live tensors may take at most where the user set a limit: the limit less what they do not show."""
        return None if self.limit_bytes is None else self.limit_bytes - sum(self.reserve_items.values())

    @property
    def reserve_items(self) -> dict[str, int]:
        """The profile's, in bytes; what the system keeps is not free any more on a device that is here."""
        return {name: size for name, size in self.profile.reserve.items() if self.elsewhere or name != "system"}

    def at_present(self, held_bytes: int) -> Setup:
        """The same with memory as it is now, of which `held_bytes` are this process's and part of every plan."""
        if self.elsewhere:
            return self
        return replace(self, device=detect_device(self.device.address, self.machine), held_bytes=held_bytes)

    def attention(self, spec: ModelSpec) -> ChosenAttention:
        """The backend for a model of these shapes: on a GPU that is here, the first that works when it is tried.

        Raises `DeviceError` where none does.
        """
        choice, index = self.choice, None if self.elsewhere else self.device.index
        if index is not None and self.machine.cuda_fault(index) is not None:
            index = None  # only figures are wanted of a card that cannot compute
        kv_heads = min(spec.kv_heads, 2)
        heads = spec.heads // spec.kv_heads * kv_heads, kv_heads, spec.head_dim

        def trial(name: str) -> str | None:
            """Torch brings its CPU kernels along, and what is not here cannot be tried."""
            if index is None:
                return None
            return self.machine.attention_fault(name, index, choice.dtype, heads, spec.traits.softcap)

        return choose_attention(choice.attention, choice.wanted_attention, self.device.kind, choice.dtype, spec, trial)

    def plan_settings(
        self, spec: ModelSpec, config: Mapping[str, Any], attention: str, record_kept: bool = False
    ) -> PlanSettings:
        """As chosen, before anything is lowered to make it fit."""
        choice = self.choice
        selector = choice.method.selector_info.build(choice.axis_settings)
        slots = selector.rolling is not None and selector.rolling.slots
        if slots:
            check_slots(config)
        return PlanSettings(
            spec=spec,
            method=choice.method,
            dtype=choice.dtype,
            chunk_size=choice.chunk_size,
            score_block=choice.score_block,
            budget_tokens=choice.budget if isinstance(choice.budget, int) else None,
            axis_settings=choice.axis_settings,
            window=selector.window,
            mandatory_tokens=selector.mandatory_tokens,
            slots=slots,
            max_new_tokens=choice.max_new_tokens,
            attention=attention,
            reserve_items=self.reserve_items,
            free_bytes=self.free_bytes,
            config=config,
            device_kind=self.device.kind,
            record_kept=record_kept,
            rates=Rates(self.profile.bandwidth_gb_s, self.profile.tflops),
        )

    def fitter(self) -> Fitter:
        """Plans under this choice. Raises `UsageError` for a budget below what the selector always keeps."""
        selector = self.choice.method.selector_info.build(self.choice.axis_settings)
        check_budget(self.choice, selector.mandatory_tokens)
        return Fitter(self.choice, selector.mandatory_tokens, self.plans)


def set_up(request: RunRequest, config: Mapping[str, Any], environ: Mapping[str, str], compute: bool = True) -> Setup:
    """Settle everything that needs neither document nor model. Raises `UsageError` and `DeviceError`.

    To `compute`, the device must work, where `--device auto` falls back to the CPU, and the profile must be one of its
    kind; else only figures are wanted, and a profile may stand for a device that is not here.
    """
    wanted = first_given(request.device, config.get("device"), "auto")
    this = replace(machine.THIS_MACHINE, environ=environ)
    here, warnings = _working_device(wanted, this) if compute else (detect_device(wanted, this), [])
    matched = match_profile(here.name, here.kind, here.board, here.total_bytes, list_profiles(environ))
    reference = first_given(request.profile, config.get("profile"), matched.name)
    profile = matched if reference == matched.name else find_profile(reference, environ)
    same_kind = profile.kind == here.kind
    if compute and not same_kind:
        raise DeviceError(
            f"profile {profile.name} is for devices of kind {profile.kind}, and {here.name} is of kind {here.kind}",
            f"use --profile {matched.name}, or leave it out",
        )
    is_here = same_kind and profile.match.accepts(here.name, here.board, here.total_bytes)
    elsewhere = not is_here and (not same_kind or (not compute and profile.memory is not None))
    device = _not_here(profile) if elsewhere else here
    choice = choose_settings(request, config, profile, device.kind)
    limit = None if request.memory_limit is None else parse_bytes(request.memory_limit, "--memory-limit")
    if limit is not None and limit < 1 << 20:
        raise UsageError(f"--memory-limit {request.memory_limit} is {limit} bytes", "give a unit, as in 6GiB or 512MiB")
    if elsewhere and profile.memory is None and limit is None:
        raise UsageError(f"profile {profile.name} does not say how much memory there is", "give --memory-limit")
    if compute and here.index is not None:
        _set_allocator(this, profile)
        warnings += _tegra_warnings(here.kind, this.environ)
    return Setup(device, profile, choice, limit, elsewhere, cache_directory(environ) / "plans", this, tuple(warnings))


def _working_device(wanted: str, this: machine.Machine) -> tuple[Device, list[str]]:
    """The device asked for, of `auto` the first that computes, and what to say of those that do not."""
    found = detect_devices(this, ask_jtop=False) if wanted == "auto" else None
    warnings = [found.unusable] if found and found.unusable else []
    for device in found.devices if found else (detect_device(wanted, this),):
        fault = None if device.index is None else this.cuda_fault(device.index)
        if fault is None:
            break
        if wanted != "auto":
            raise DeviceError(f"{device.name} cannot be used: {fault}", "use --device cpu, or a torch built for it")
        warnings.append(f"{device.address}, {device.name}, cannot be used ({fault})")
    return device, [f"{warning}, so {device.address} is" for warning in warnings]


def _set_allocator(this: machine.Machine, profile: Profile) -> None:
    try:
        this.set_allocator(profile.allocator)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"profile {profile.name} sets {dict(profile.allocator)}, which torch refuses: {machine.reason_of(error)}",
            "correct its allocator",
        ) from error


def _tegra_warnings(kind: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Only torch's native allocator works on a Tegra, and only as it is."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        for absent in ("cudaMallocAsync", "expandable_segments:True"):
            if kind == "jetson" and absent in environ.get(name, ""):
                yield f"{name} asks for {absent}, which a Jetson has not: unset it if allocations fail"


def _not_here(profile: Profile) -> Device:
    """The device that `profile` is for, with nothing else on it but what the reserve names."""
    sources = dict.fromkeys(("total", "free"), f"profile {profile.name}")
    unified = profile.kind == "jetson"
    return Device(profile.description, profile.kind, profile.memory, profile.memory, unified, sources)
