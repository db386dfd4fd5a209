"""Batch inference and evaluation over files on a Ray cluster: the functions, and the parts of files, of one process.

Files are cut into blocks, and each worker reads its blocks itself, so inputs never travel between machines. A block is also a
batch of the model: where it runs does not change its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anytime.checks import check_count
from anytime.errors import InputError, MissingExtraError
from anytime.evaluation import Evaluation, evaluate
from anytime.evaluation.shards import Packed
from anytime.loading.blocks import Block, cut_files
from anytime.loading.inputs import array_batch
from anytime.loading.models import input_shape, make_batch, reads_texts
from anytime.models.given import names_of
from anytime.run import Budget, Runner, open_folder

Columns = dict[str, NDArray[Any]]


class Predictor:
    """A model that answers batches of columns; a callable class for Ray Data's `map_batches`.

    Args:
        model: A folder, as `anytime predict` takes it.
        column: The column with the inputs. For a model that takes several tensors, each is the column of its name.
        rule: How the exits are combined; by default what was saved with the model, or as `Runner` chooses.
        engine: What runs the stages.
        calibration: Files of fitted objects; by default those saved with the model.
        policy: The file of a fitted policy that lets inputs stop early; by default the one saved with the model.
        exits: The largest number of exits.
        data: What the model was trained on, if its folder does not say so.
        probabilities: Whether to return those of all classes.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        column: str = "x",
        rule: str | None = None,
        engine: str = "eager",
        calibration: Sequence[str | Path] = (),
        policy: str | Path | None = None,
        exits: int | None = None,
        data: str | None = None,
        probabilities: bool = False,
    ) -> None:
        import anytime

        self._column, self._probabilities, self._budget = column, probabilities, Budget(exits=exits)
        self._opened = open_folder(model, data)
        network = self._opened.model
        fitted = tuple(anytime.load(path) for path in calibration)
        chosen: Any = None if policy is None else anytime.load(policy)
        names = names_of(network)
        self._several = names if len(names) > 1 else ()
        asked = {"rule": rule, "calibration": fitted or None, "policy": chosen}
        given = {argument: value for argument, value in asked.items() if value is not None}
        arguments = self._opened.runner_arguments(engine=engine, example=make_batch(network, 1), **given)
        self._runner = Runner(network, **arguments)

    def __call__(self, batch: Columns) -> Columns:
        """The columns `labels`, `confidence`, `exit` and `fell_back` in place of the inputs."""
        taken = self._several or (self._column,)
        if missing := sorted(set(taken) - set(batch)):
            raise InputError(
                f"the batch has the columns {', '.join(batch)}",
                expected=f"the inputs of the model: {', '.join(taken)}",
                fix=f"rename a column to {missing[0]}" + ("" if self._several else ", or pass column with its name"),
            )
        answers = self.predict({name: batch[name] for name in taken} if self._several else batch[self._column])
        return {**{name: values for name, values in batch.items() if name not in taken}, **answers}

    def predict(self, inputs: NDArray[Any] | Mapping[str, NDArray[Any]]) -> Columns:
        """The answers to a batch of inputs, as columns; a model that takes several tensors gets them by name."""
        x = self._batch(inputs) if not isinstance(inputs, Mapping) else {name: _tensor(inputs[name]) for name in self._several}
        answer = self._runner.predict(x, budget=self._budget)
        columns = {
            "labels": answer.labels.numpy(),
            "confidence": answer.confidence.numpy(),
            "exit": np.broadcast_to(np.asarray(answer.exit), len(answer.labels)).copy(),
            "fell_back": answer.fell_back.numpy(),
        }
        return {**columns, "probabilities": answer.probs.numpy()} if self._probabilities else columns

    def _batch(self, inputs: NDArray[Any]) -> Tensor:
        inputs = np.array(inputs)  # mapped files and Ray's blocks cannot be written to, and torch warns of such arrays
        if not reads_texts(self._opened):
            sizes = input_shape(self._opened.model)
            if inputs.ndim == 2 and inputs.shape[1] == prod(sizes):  # columns hold flat lists
                inputs = inputs.reshape(-1, *sizes)
        return array_batch(inputs, self._opened)

    def close(self) -> None:
        """End the runner."""
        self._runner.close()


class _BlockPredictor(Predictor):
    """Answers blocks, given as rows of their attributes."""

    def __call__(self, batch: Columns) -> Columns:
        fields = {name: values.tolist() for name, values in batch.items()}
        parts = [self.answer(Block(*values)) for values in zip(*fields.values(), strict=True)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def answer(self, block: Block) -> Columns:
        several = {name: replace(block, column=name).read() for name in self._several}
        answers = self.predict(several or block.read())
        return {"row": np.arange(block.first, block.first + block.stop - block.start), **answers}


def _tensor(values: NDArray[Any]) -> Tensor:
    """A column of numbers as a tensor of its own memory, in the usual type of its kind."""
    return torch.from_numpy(np.array(values, dtype=np.float32 if values.dtype.kind == "f" else np.int64))


def map_batches(dataset: Any, model: str | Path, *, rows: int = 64, workers: int = 1, gpus: float = 0, **settings: Any) -> Any:
    """A Ray dataset with answers in place of its inputs.

    Args:
        dataset: A `ray.data.Dataset`.
        model: A folder that every node can read.
        rows: Rows per batch.
        workers: Number of processes, each with the model and one core.
        gpus: GPUs per process.
        settings: Further arguments of `Predictor`.
    """
    return _map(dataset, Predictor, model, rows=rows, workers=workers, gpus=gpus, **settings)


def predict_files(
    files: Iterable[str | Path],
    model: str | Path,
    *,
    rows: int = 64,
    column: str | None = None,
    workers: int = 0,
    gpus: float = 0,
    **settings: Any,
) -> Columns:
    """The answers to all inputs of some files, as columns in the order of the files.

    Args:
        files: As for `cut_files`. With workers, every node must be able to read them.
        model: A folder, as `anytime predict` takes it.
        rows: Rows per batch.
        column: As for `cut_files`. For a model that takes several tensors, one of their names; the others are read by name.
        workers: Number of Ray processes; 0 runs in this process, without Ray.
        gpus: GPUs per Ray process.
        settings: Further arguments of `Predictor`.
    """
    blocks = cut_files(files, rows=rows, column=column)
    parts = _with_ray(blocks, model, workers, gpus, settings) if workers else _here(blocks, model, settings)
    found = list(parts)
    columns = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
    order = np.argsort(columns.pop("row"))
    return {name: values[order] for name, values in columns.items()}


def evaluate_files(files: Any, labels: Any = None, *, work: str | Path | None = None, **settings: Any) -> Evaluation:
    """`anytime.evaluate` of files on a Ray cluster: the same parts and the same sums, added in the same order.

    Args:
        files: Paths, folders or globs, as `anytime.evaluate` takes them; every node must be able to read them.
        labels: Likewise.
        work: A folder of this process for the sums of finished parts.
        settings: Further arguments of `anytime.evaluate`.
    """
    return evaluate(files, labels, work=work, mapper=_map_tasks, **settings)


def _map_tasks(work: Callable[[bytes], tuple[bool, bytes]], tasks: Sequence[tuple[int, bytes]]) -> Iterator[Packed]:
    def attempt(row: dict[str, Any]) -> dict[str, Any]:
        worked, answer = work(row["task"])
        return {"index": row["index"], "worked": worked, "answer": answer}

    items = [{"index": index, "task": task} for index, task in tasks]
    if items:
        dataset = _ray_data().from_items(items, override_num_blocks=len(items)).map(attempt, num_cpus=1)
        for row in dataset.iter_rows():
            yield int(row["index"]), bool(row["worked"]), bytes(row["answer"])


def _here(blocks: Sequence[Block], model: str | Path, settings: dict[str, Any]) -> Iterator[Columns]:
    predictor = _BlockPredictor(model, **settings)
    try:
        for block in blocks:
            yield predictor.answer(block)
    finally:
        predictor.close()


def _with_ray(
    blocks: Sequence[Block], model: str | Path, workers: int, gpus: float, settings: dict[str, Any]
) -> Iterator[Columns]:
    data = _ray_data()
    # Neighbours stay together: a worker opens a file once for many blocks.
    dataset = data.from_items([asdict(block) for block in blocks], override_num_blocks=min(4 * workers, len(blocks)))
    answers = _map(dataset, _BlockPredictor, model, rows=None, workers=workers, gpus=gpus, **settings)
    yield from answers.iter_batches(batch_size=None, batch_format="numpy")


def _map(dataset: Any, kind: type, model: str | Path, *, rows: int | None, workers: int, gpus: float, **settings: Any) -> Any:
    return dataset.map_batches(
        kind,
        batch_size=rows,
        batch_format="numpy",
        fn_constructor_args=(str(model),),
        fn_constructor_kwargs=settings,
        compute=_ray_data().ActorPoolStrategy(size=check_count(workers, "workers")),
        num_cpus=1,
        num_gpus=gpus,
    )


def _ray_data() -> Any:
    try:
        import ray.data
    except ImportError as error:
        raise MissingExtraError(
            "Ray is not installed", expected="the extra ray", fix="pip install 'anytime-nn[ray]'"
        ) from error
    return ray.data
