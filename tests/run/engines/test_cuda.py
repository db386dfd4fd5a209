"""The CUDA graphs engine, on a stand-in that replays on fixed memory; the last test needs a GPU."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch

from anytime.errors import DeviceError, OptionError, ShapeError
from anytime.run.engines.cuda import CudaGraphsEngine
from anytime.run.engines.folding import difference


def test_batches_between_sizes_are_padded_and_larger_ones_run_without_a_graph(make_network: Any, recorder: Any) -> None:
    model, x = make_network("mlp")
    engine = CudaGraphsEngine(model, x, sizes=(4, 2), recorder=recorder)
    for rows, replays in ((1, 3), (3, 3), (4, 3), (5, 0)):
        recorder.replays = 0
        batch = torch.randn(rows, 2)
        run = engine.begin(batch)
        assert difference([run.advance() for _ in range(3)], list(model.exits(batch))) < 1e-5
        assert recorder.replays == replays


def test_a_large_batch_moves_into_a_graph_when_enough_rows_have_left(make_network: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    engine = CudaGraphsEngine(model, x, sizes=(2,), pack=True, recorder=recorder)
    batch = torch.randn(5, 3, 32, 32)
    wanted = list(model.exits(batch))
    run = engine.begin(batch)
    run.advance()
    assert recorder.replays == 0
    run.keep(torch.tensor([3, 1]))
    assert difference([run.advance(), run.advance()], [logits[[3, 1]] for logits in wanted[1:]]) < 1e-5
    assert recorder.replays == 2


def test_each_size_runs_in_the_fastest_variant(make_network: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    recorder.times = {(1, "fused"): 2e-3, (1, "packed"): 1e-3, (4, "fused"): 2e-3, (4, "packed"): 3e-3}
    engine = CudaGraphsEngine(model, x, sizes=(4, 1), recorder=recorder)
    assert engine.why == "requested; all exits for a batch of 1: packed 1 ms, fused 2 ms; of 4: fused 2 ms, packed 3 ms"
    assert [lane.variant.name for lane in engine._lanes] == ["packed", "fused"]
    for rows in (1, 2, 4, 7):
        batch = torch.randn(rows, 3, 32, 32)
        run = engine.begin(batch)
        assert difference([run.advance() for _ in range(3)], list(model.exits(batch))) < 1e-5


def test_a_run_stays_in_its_variant(make_network: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    recorder.times = {(4, "fused"): 0.5}
    engine = CudaGraphsEngine(model, x, sizes=(1, 4), recorder=recorder)
    for rows in (3, 6):
        batch = torch.randn(rows, 3, 32, 32)
        wanted = list(model.exits(batch))
        run = engine.begin(batch)
        assert difference([run.advance()], wanted[:1]) < 1e-5
        run.keep(torch.tensor([2]))  # one row would be packed, had it come alone
        recorder.replays = 0
        assert difference([run.advance(), run.advance()], [logits[[2]] for logits in wanted[1:]]) < 1e-5
        assert recorder.replays == 2
        assert engine._lanes[1].owner is run


def test_logits_are_the_caller_s_own(make_network: Any, recorder: Any) -> None:
    model, x = make_network("mlp")
    engine = CudaGraphsEngine(model, x, sizes=(2,), recorder=recorder)
    first = engine.begin(x).advance()
    before = first.clone()
    engine.begin(x + 1).advance()
    assert torch.equal(first, before)


def test_inputs_of_another_form_run_without_a_graph(make_network: Any, recorder: Any) -> None:
    model, x = make_network("mlp")
    engine = CudaGraphsEngine(model, x, sizes=(2,), recorder=recorder)
    with pytest.raises(ShapeError, match=r"inputs have shape \(2, 1\)"):  # and not numbers made by broadcasting
        engine.begin(x[:, :1]).advance()
    assert recorder.replays == 0
    model, x = make_network("msdnet")
    with pytest.raises(ShapeError, match=r"images have shape \(2, 1, 32, 32\)"):
        CudaGraphsEngine(model, x, sizes=(2,), recorder=recorder).begin(x[:, :1]).advance()


def test_a_closed_run_is_not_copied_out_and_lets_go_of_its_lane(make_network: Any, recorder: Any) -> None:
    model, x = make_network("mlp")
    engine = CudaGraphsEngine(model, x, sizes=(2,), recorder=recorder)
    run = engine.begin(x)
    run.advance()
    assert engine._lanes[0].owner is run
    run.close()
    assert engine._lanes[0].owner is None


def test_threads_take_turns(make_network: Any, recorder: Any) -> None:
    model, x = make_network("mlp")
    engine = CudaGraphsEngine(model, x, sizes=(1, 2), recorder=recorder)
    wrong: list[float] = []

    def work(seed: int) -> None:
        for number in range(30):
            batch = torch.randn(1 + number % 2, 2, generator=torch.Generator().manual_seed(100 * seed + number))
            run = engine.begin(batch)
            share = difference([run.advance() for _ in range(3)], list(model.exits(batch)))
            if share > 1e-4:
                wrong.append(share)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_wrong_options_are_named(make_network: Any, recorder: Any) -> None:
    model, x = make_network("mlp")
    for sizes in ((), (0,), (1.5,)):
        with pytest.raises(OptionError, match="sizes is"):
            CudaGraphsEngine(model, x, sizes=sizes, recorder=recorder)
    with pytest.raises(OptionError, match="precision is 'int8'"):
        CudaGraphsEngine(model, x, precision="int8", recorder=recorder)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(make_network: Any) -> None:
    model, x = make_network("mlp")
    with pytest.raises(DeviceError, match="no GPU"):
        CudaGraphsEngine(model, x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"pack": True}, {"pack": False}])
def test_graphs_on_a_gpu_give_the_logits(make_network: Any, precision: Any, options: dict[str, bool]) -> None:
    model, x = make_network("msdnet")
    engine = CudaGraphsEngine(model, x, sizes=(1, 4), precision=precision, **options)  # type: ignore[arg-type]
    for rows in (1, 2, 7):
        batch = torch.randn(rows, 3, 32, 32)
        wanted = list(model.exits(batch))
        runs = [engine.begin(batch), engine.begin(batch)]
        for exit in range(3):
            for run in runs:
                assert difference([run.advance()], [wanted[exit]]) <= engine.TOLERANCE
