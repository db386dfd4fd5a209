"""What results look like: short in a notebook, as tables in a terminal, as matplotlib plots and as a report.

In a notebook the last line of a cell is enough: `found`, `found.table("product")`, `found.plot("label_drop")`.
"""
# Needs: matplotlib

import sys
from pathlib import Path

import anytime

SMALL = "--small" in sys.argv
folder = Path("pictures")
folder.mkdir(exist_ok=True)

logits = anytime.samples.cifar100_msdnet()  # 1,000 test images of CIFAR-100, 7 exits
rows = slice(0, 300 if SMALL else 1000)
found = anytime.evaluate(logits.logits[:, rows], logits.labels[rows])
print(repr(found))
print()
print(found.table())
print()
print("\n".join(str(found.table("product")).splitlines()[:6]))

for name in ("accuracy", "label_drop", "reliability_7"):
    found.plot(name).figure.savefig(folder / f"{name}.png", dpi=120)

certificate = anytime.certify(logits.logits[:, rows], logits.labels[rows], "product")
print()
print(certificate.table())
certificate.plot().figure.savefig(folder / "certificate.png", dpi=120)

report = anytime.write_report(found, "report", title="MSDNet on CIFAR-100")
print()
print(f"plots: {', '.join(sorted(path.name for path in folder.iterdir()))}; report: {report}")
