"""`serve.py`: from a config to a running server."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from jaxspec.config import EngineSection, ServeConfig, render
from jaxspec.errors import ConfigError, RequestError, problem
from jaxspec.serving.facts import Facts, Loaded
from jaxspec.serving.grammar import GrammarCompiler
from jaxspec.serving.progress import Stages
from jaxspec.serving.server import Server
from jaxspec.serving.text import TokenizerCodec

if TYPE_CHECKING:
    from jaxspec.drafters.options import DraftOptions

__all__ = ["ENGINE_KEYS", "QUICKSTART_DRAFTER", "draft_options", "load", "run"]

# Where configs/quickstart.yaml exports what it trains. Only this path may be absent: another one is somebody's drafter.
QUICKSTART_DRAFTER = "out/quickstart/drafter"
# Keys of `engine` that the engine takes as they are.
ENGINE_KEYS = (
    *("num_slots", "slot_buckets", "max_context", "prefill_chunk", "prefill_pieces", "page_size", "num_pages"),
    *("prefix_cache", "overlap", "acceptance", "confidence_threshold", "align", "min_verify_rows", "max_verify_rows"),
    *("pause_drafting", "rules", "max_logprobs", "attention", "pack_weights", "bare_rounds"),
)
_TRAIN = "python train.py --config configs/quickstart.yaml"


def run(config: ServeConfig) -> int:
    """Serves until SIGTERM or SIGINT. Returns 0 after a clean end, 1 when the runner broke.

    Raises what loading and binding raise: CheckpointError, ConfigError, HubError, ServerError.
    """
    say(render(config).rstrip())
    server = Server(
        lambda check: load(config, check),
        host=config.server.host,
        port=config.server.port,
        max_queue=config.server.max_queue,
        drain_seconds=config.server.drain_seconds,
        say=say,
    )
    return asyncio.run(_until_signalled(server))


def say(line: str) -> None:
    """A line for the operator, at once even through a pipe."""
    print(line, flush=True)


async def _until_signalled(server: Server) -> int:
    if threading.current_thread() is not threading.main_thread():
        return await server.run()  # signals belong to whoever owns the main thread
    previous: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        server.stop()
        signal.signal(number, previous[number])  # a second one ends the process at once

    for number in (int(signal.SIGTERM), int(signal.SIGINT)):
        previous[number] = signal.signal(number, stop)
    try:
        return await server.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def load(config: ServeConfig, check: Callable[[], None], stages: Stages | None = None, **instead: Any) -> Loaded:
    """Loads target and drafter and compiles the engine's executables, on the thread that will own them.

    `check` is called between the stages and may raise to leave. `instead` are the engine's own arguments in place of
    the config's.
    """
    from jaxspec.checkpoints.drafting import check_source, open_drafter

    source = choose_drafter(config.drafter)
    if source is not None:
        check_source(source)  # a wrong path should not wait for the target
    from jaxspec.checkpoints.target import load_target
    from jaxspec.parallel.mesh import placement
    from jaxspec.serving.cost import load_cost_table
    from jaxspec.serving.cost_origin import check_origin, origin
    from jaxspec.serving.engine import Engine
    from jaxspec.serving.sharded import ShardedEngine

    _use_compilation_cache(config.compilation_cache)
    cost_file = None if config.engine.cost_table is None else Path(config.engine.cost_table)
    table = None if cost_file is None else load_cost_table(cost_file)
    if table is not None and table.estimated:
        say(f"engine.cost_table {cost_file} is a compiler's estimate, not a measurement")
    mesh = config.mesh
    place = placement(mesh.data, mesh.tensor) if mesh.data * mesh.tensor > 1 else None
    if place is not None:
        kind = place.mesh.devices.flat[0].device_kind
        say(f"mesh: data={mesh.data} tensor={mesh.tensor}, the first {place.mesh.size} devices ({kind})")
    with stages or Stages(1 if source is None else 2) as progress:
        with progress.stage("loading the target"):
            target = load_target(
                config.target.source,
                dtype=config.target.dtype,
                quantization=config.target.quantization,
                placement=place,
                lora=config.target.lora,
            )
            codec = _codec(target.directory)
        check()
        draft, engine = None, config.engine
        num_proposals = engine.num_proposals
        if source is not None:
            options = draft_options(engine)
            with progress.stage("loading the drafter"):
                draft, num_proposals = open_drafter(source, target, options)
            check()
        if draft is not None and engine.sts_temperatures is not None:
            draft = dataclasses.replace(draft, drafter=_calibrated(draft.drafter, Path(engine.sts_temperatures)))
        grammars = _grammars(target, codec) if engine.grammar else None
        arguments = {name: getattr(engine, name) for name in ENGINE_KEYS} | {"cost_table": table} | instead
        build = Engine if place is None else functools.partial(ShardedEngine, placement=place)
        runner: Any = build(target, draft, num_proposals=num_proposals, codec=codec, grammars=grammars, **arguments)
        made_for = None if draft is None else origin(target, draft, runner.num_proposals)
        estimated = table is not None and table.estimated
        if cost_file is not None and made_for is not None and not estimated:
            line = check_origin(cost_file, made_for)
            if line:
                say(line)
        name = target.name
        del target  # its layers, where the engine packed them

        def compiled(name: str, seconds: float) -> None:
            progress.done(f"compiling {name}", seconds)
            check()

        progress.add(runner.num_executables)
        progress.show("compiling")
        runner.warm_up(compiled)
    count, cached = runner.num_executables, runner.executables.cached
    say(f"{count} executables are ready, {cached} of them from the compilation cache")
    facts = Facts(
        target=name,
        drafter=source or "none",
        method="none" if draft is None else draft.drafter.method,
        vocab_size=runner.vocab_size,
        max_context=runner.max_context,
        slots=runner.num_slots,
        num_proposals=runner.num_proposals,
    )
    return Loaded(runner, codec, facts, grammars, made_for)


def draft_options(engine: EngineSection) -> DraftOptions:
    """The keys of `engine` that a drafter answers to."""
    from jaxspec.drafters.options import DraftOptions

    return DraftOptions(**{key.name: getattr(engine, key.name) for key in dataclasses.fields(DraftOptions)})


def _calibrated(drafter: Any, path: Path) -> Any:
    """The drafter with the temperatures of an STS file."""
    from jaxspec.drafters.calibration import Calibration

    if not hasattr(drafter, "temperatures"):
        expected = f"null: a {drafter.method} drafter has no confidence head"
        raise ConfigError(problem("engine.sts_temperatures", str(path), expected))
    return dataclasses.replace(drafter, temperatures=Calibration.load(path, drafter.num_proposals).temperatures)


def _grammars(target: Any, codec: TokenizerCodec | None) -> GrammarCompiler:
    if codec is None:
        raise ConfigError(problem("engine.grammar", "true", "false: this target has no tokenizer"))
    try:
        return GrammarCompiler(codec.tokenizer, target.config.vocab_size, target.config.eos_token_ids)
    except RequestError as error:  # llguidance is not installed
        raise ConfigError(f"engine.{error}") from error


def choose_drafter(source: str | None) -> str | None:
    """The drafter to load; None decodes plainly, as does a quickstart where nothing was trained yet (and says so)."""
    if source is None or source.lower() == "none":
        return None
    if source == QUICKSTART_DRAFTER and not Path(source).exists():
        say(f"no drafter in {source} yet: serving with drafter none; train one with `{_TRAIN}` and start again")
        return None
    return source


def _codec(directory: Path | None) -> TokenizerCodec | None:
    from jaxspec.checkpoints.tokenizer import load_tokenizer

    if directory is None or not (Path(directory) / "tokenizer.json").exists():
        say("the target has no tokenizer.json: serving token ids only")
        return None
    return TokenizerCodec(load_tokenizer(directory))


def _use_compilation_cache(folder: str | None) -> None:
    """Keeps executables between starts, in ~/.cache/jaxspec/xla unless the config names a folder."""
    import jax

    from jaxspec.checkpoints.cache import compilation_cache

    path = Path(folder).expanduser() if folder else compilation_cache()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = f"a folder that can be written ({error.strerror})"
        raise ConfigError(problem("compilation_cache", str(path), expected, "choose another one")) from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
