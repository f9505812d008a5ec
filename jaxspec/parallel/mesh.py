"""The mesh of a server, over devices that are here or over a TPU topology that is not."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError, InvariantError, problem
from jaxspec.parallel.rules import DATA, TENSOR

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU: libtpu's name of a machine with it, and its vendor's figures for a device as jax counts devices (a
    TPU7x chip is two): bytes of HBM, bfloat16 FLOP and HBM bytes a second."""

    machine: str
    hbm_bytes: int
    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, moved: float) -> float:
        """The longer of computing and moving so much at these limits."""
        return max(flops / self.flops_per_second, moved / self.bytes_per_second)


CHIPS = {
    "v5e": Chip("v5litepod-4", 16 * GIB, 197e12, 819e9),
    "v5p": Chip("v5p-8", 95 * GIB, 459e12, 2765e9),
    "v6e": Chip("v6e-4", 32 * GIB, 918e12, 1640e9),
    "tpu7x": Chip("tpu7x-8", 96 * GIB, 1153e12, 3690e9),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Puts trees on a mesh of `data` x `tensor` devices. `abstract`: the devices are not there, and shapes with their
    shardings stand for arrays."""

    mesh: Mesh
    abstract: bool = False

    @property
    def data(self) -> int:
        """Shards of the slots."""
        return self.mesh.shape[DATA]

    @property
    def tensor(self) -> int:
        """Shards of each model."""
        return self.mesh.shape[TENSOR]

    def sharding(self, spec: PartitionSpec, by_data: bool = False) -> NamedSharding:
        """Of an array; `by_data` of one with an axis of the data shards before those of `spec`."""
        return NamedSharding(self.mesh, PartitionSpec(DATA, *spec) if by_data else spec)

    def put(self, tree: Any, specs: Any) -> Any:
        """The leaves where their specs say. One array that occurs twice stays one array."""
        placed: dict[int, Any] = {}

        def one(leaf: Any, spec: PartitionSpec) -> Any:
            if id(leaf) not in placed:
                placed[id(leaf)] = self._placed(leaf, self.sharding(spec))
            return placed[id(leaf)]

        return jax.tree.map(one, tree, specs)

    def _placed(self, leaf: Any, sharding: NamedSharding) -> Any:
        if self.abstract:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    def make(self, function: Callable[[], Any], specs: Any) -> Any:
        """What `function` returns, once a data shard, made where it belongs: every leaf gets an axis in front."""
        shardings = jax.tree.map(lambda spec: self.sharding(spec, by_data=True), specs)
        every = lambda: jax.tree.map(lambda x: jax.numpy.broadcast_to(x, (self.data, *x.shape)), function())  # noqa: E731
        if not self.abstract:
            return jax.jit(every, out_shardings=shardings)()
        shapes = jax.eval_shape(every)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

    def inputs(self, shards: Sequence[Any]) -> Any:
        """One tree of host arrays a data shard -> one tree, whole on the tensor shards of each."""
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *shards)
        sharding = self.sharding(PartitionSpec(), by_data=True)
        if self.abstract:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), stacked)
        return jax.device_put(stacked, sharding)

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(weights, *by_data)` of one data shard as a function of all of them.

        How its work is split follows from the arguments' shardings; a data shard needs nothing of another.
        """
        if self.data > 1:
            return lambda weights, *trees: jax.vmap(
                lambda *own: function(weights, *own), axis_name=DATA, spmd_axis_name=DATA
            )(*trees)

        def alone(weights: Any, *trees: Any) -> Any:
            out = function(weights, *(jax.tree.map(lambda x: x[0], tree) for tree in trees))
            return jax.tree.map(lambda x: x[None], out)

        return alone


def placement(data: int, tensor: int, devices: Sequence[Any] | None = None, abstract: bool = False) -> Placement:
    """Over the first data x tensor devices. Raises ConfigError naming mesh.data and mesh.tensor for too few."""
    found = jax.devices() if devices is None else devices
    if data * tensor > len(found):
        wanted = f"found {data} x {tensor}"
        raise ConfigError(problem("mesh.data x mesh.tensor", wanted, f"at most {len(found)} devices, what there is"))
    grid = np.array(found[: data * tensor]).reshape(data, tensor)
    return Placement(Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2), abstract)


def shard(array: jax.Array, index: int) -> np.ndarray:
    """What data shard `index` of an array with the data axis in front holds, on the host: read from one device."""
    return jax.device_get(_copies(array, index)[0])[0]


def check_copies(array: jax.Array, name: str) -> None:
    """Raises InvariantError where the devices of a data shard do not hold the same values: a decision must be one."""
    for index in range(array.shape[0]):
        first, *others = jax.device_get(_copies(array, index))
        if any(not np.array_equal(first, other) for other in others):
            raise InvariantError(
                problem(f"{name} of data shard {index}", "values that differ", "one decision on all its tensor shards")
            )


def _copies(array: jax.Array, index: int) -> list[Any]:
    return [one.data for one in array.addressable_shards if (one.index[0].start or 0) == index]


def tpu_devices(topology: str) -> Sequence[Any]:
    """Devices of a topology (`v5e:2x2`) that need not be there. One kind of chip a process.

    Raises ConfigError for a kind that is unknown, a shape that there is not, and where libtpu is missing.
    """
    kind, _, shape = topology.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):  # libtpu dies of a 0
        raise ConfigError(
            problem("--tpu", f"found {topology}", f"one of {', '.join(CHIPS)} and a shape, for example v5e:2x2")
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(problem("--plan", "no libtpu", "it, since it compiles", "pip install libtpu"))
    settings = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ.update(settings | {"TPU_ACCELERATOR_TYPE": CHIPS[kind].machine})
    # where the compiler moves large transposes to a sparse core, an older jaxlib cannot print the program
    os.environ.setdefault("LIBTPU_INIT_ARGS", "--xla_tpu_enable_offloading_copy_to_sparsecore=false")
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            problem("--tpu", f"found {topology}", "a shape of this chip", " ".join(str(error).split()))
        ) from error
