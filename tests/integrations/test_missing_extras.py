from __future__ import annotations

import sys
from importlib import import_module

import pytest

from anytime.errors import MissingExtraError


@pytest.mark.parametrize(
    ("adapter", "packages"),
    [("torchmetrics", ["torchmetrics"]), ("lightning", ["lightning.pytorch", "lightning", "pytorch_lightning"])],
)
def test_an_adapter_without_its_library_names_the_extra(
    adapter: str, packages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if adapter == "lightning":
        pytest.importorskip("torchmetrics", reason="the callbacks need torchmetrics, which Lightning brings")
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"anytime.integrations.{adapter}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"anytime-nn\[{adapter}\]"):
        import_module(f"anytime.integrations.{adapter}")
