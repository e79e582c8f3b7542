"""The names of an adapter's modules: those that transformers gives them become those of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pagewire.services.executor.adapters.low_rank import AdapterError, AdapterFiles, LowRank, Stack
from pagewire.services.executor.layers.experts.experts import ExpertsConfig
from pagewire.services.executor.loading.weights.prefix import renamed
from pagewire.services.executor.models.architecture import EXPERTS_ALIASES, Interleaved
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.models.registry import ARCHITECTURES

Aliases = Mapping[str, tuple[str, ...] | Interleaved]


def named_modules(files: AdapterFiles, model: OwnModel) -> dict[str, LowRank]:
    """Returns the modules by the checkpoint's names, each expert's projections by themselves. Raises AdapterError."""
    own = ARCHITECTURES[model.config.architecture]
    aliases = {**EXPERTS_ALIASES, **own.aliases}
    inner = {stack.module for stack in files.stacks.values()}
    names = renamed([*files.modules, *inner], own.prefixes, own.base)
    parts = [(stored, _aliased(names[stored], module, aliases)) for stored, module in files.modules.items()]
    experts = getattr(model.config, "experts", None)
    for stored, stack in files.stacks.items():
        if not isinstance(experts, ExpertsConfig):
            raise AdapterError(
                f"{model.config.architecture} has no experts, and the adapter has {stack.module}; it was made for "
                f"{files.base_model or 'another model'}"
            )
        parts.append((stored, _of_experts(stored, stack, names[stack.module], experts, aliases)))
    found: dict[str, LowRank] = {}
    for stored, of_it in parts:
        for name, part in of_it:
            if found.setdefault(name, part) is not part:
                raise AdapterError(f"{stored} changes {name}, as another tensor does; save one adapter to its folder")
    return found


def _aliased(name: str, module: LowRank, aliases: Aliases) -> Iterator[tuple[str, LowRank]]:
    """Yields a layer under its name in the checkpoint, or its shares of outputs under theirs."""
    end = next((end for end in aliases if f".{name}.weight".endswith(f".{end}")), None)
    alias = None if end is None else aliases[end]
    if end is None or not isinstance(alias, tuple) or len(module.up) % len(alias):
        yield name, module
        return
    prefix = f"{name}.weight".removesuffix(end)
    for part, up in zip(alias, module.up.chunk(len(alias)), strict=True):
        yield (prefix + part).removesuffix(".weight"), LowRank(module.down, up, module.scale)


def _of_experts(
    stored: str, stack: Stack, name: str, experts: ExpertsConfig, aliases: Aliases
) -> Iterator[tuple[str, LowRank]]:
    """Yields the projections of each expert. stored: the name in the file. name: of the module in the checkpoint."""
    end, alias = _parameter(stored, stack, name, experts, aliases)
    module, _, parameter = end.rpartition(".")
    count, (rank, scale) = experts.num_experts, stack.terms(parameter)
    if stack.down.shape[0] != count * rank or stack.up.shape[1] != count * rank:
        raise AdapterError(
            f"{stored} has {stack.down.shape[0]} rows; {count} experts of rank {rank} have {count * rank}: the adapter "
            "was made for another model, or its two files come from different trainings"
        )
    downs = stack.down.view(count, rank, -1)
    ups = stack.up.view(len(stack.up), rank, count).permute(2, 0, 1)
    prefix, parts = name.removesuffix(module), _names(alias)
    size = len(stack.up) // len(parts)
    for index, part in enumerate(parts):
        rows = slice(index * size, (index + 1) * size)
        of_part = ups[:, slice(index, None, len(parts)) if isinstance(alias, Interleaved) else rows]
        # What was trained as two adapters, of gates and of ups, has zeros where it is the other's.
        is_used = of_part.count_nonzero((0, 1)) > 0
        used = slice(None) if is_used.all() or not is_used.any() else is_used
        for expert in range(count):
            full = (prefix + part).format(expert).removesuffix(".weight")
            yield full, LowRank(downs[expert][used], of_part[expert][:, used], scale)


def _parameter(
    stored: str, stack: Stack, name: str, experts: ExpertsConfig, aliases: Aliases
) -> tuple[str, tuple[str, ...] | Interleaved]:
    """Returns the alias of the parameter that the stack changes, and its end of a name. Raises AdapterError."""
    inputs, outputs = stack.down.shape[1], stack.up.shape[0]
    hidden, inner = experts.hidden_size, experts.intermediate_size
    for end, alias in aliases.items():
        module, first = end.rpartition(".")[0], _names(alias)[0]
        expected = (hidden, 2 * inner) if len(_names(alias)) == 2 else (inner, hidden)
        is_weight = "{}" in first and first.endswith(".weight")
        if is_weight and f".{name}".endswith(f".{module}") and (inputs, outputs) == expected:
            return end, alias
    raise AdapterError(
        f"{stored} has {inputs} inputs and {outputs} outputs; gates and ups of the experts have {hidden} and "
        f"{2 * inner}, downs {inner} and {hidden}: the adapter was made for another model, or by another version of "
        "peft"
    )


def _names(alias: tuple[str, ...] | Interleaved) -> tuple[str, ...]:
    return alias.names if isinstance(alias, Interleaved) else alias


__all__ = ["named_modules"]
