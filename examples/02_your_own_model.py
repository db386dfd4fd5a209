"""Exits on a Hugging Face transformer, in one line: how it is split, what each exit costs, and an answer by a deadline.

The weights are random here, so nothing is downloaded and the answers mean nothing. With weights of your own, load them with
`from_pretrained` and train the heads; the last exit is always the output of your model, unchanged.
"""

# Needs: transformers

import sys

import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

import anytime
from anytime.models import measure_cost

small = "--small" in sys.argv
shape = {"dim": 64, "n_heads": 4, "hidden_dim": 128, "vocab_size": 1000} if small else {}
bert = DistilBertForSequenceClassification(DistilBertConfig(num_labels=4, **shape)).eval()

# What a tokenizer returns for two texts, the second one shorter.
tokens = {"input_ids": torch.randint(5, 1000, (2, 32)), "attention_mask": torch.ones(2, 32, dtype=torch.int64)}
tokens["attention_mask"][1, 20:] = 0

model = anytime.attach_exits(bert, at=[0.33, 0.67], example=tokens, frozen=True).eval()
print(f"{model.num_exits} exits: after {', '.join(model.exit_names)}, and at the end")
print(f"The stages were found by {model.method}: {model.why}")

cost = measure_cost(model, tokens)
for exit, macs in enumerate(cost.macs, 1):
    print(f"exit {exit}: {macs / 1e6:7.1f} million MACs per text, {macs / cost.macs[-1]:.0%} of all")

with torch.no_grad():
    logits = model(tokens)  # (exits, batch, classes)
    print(
        "largest difference of the last exit to the model's own logits:",
        (logits[-1] - bert(**tokens).logits).abs().max().item(),
    )

    longer = {name: torch.nn.functional.pad(tensor, (0, 8)) for name, tensor in tokens.items()}
    print("largest change of any exit by eight more padding tokens:", (model(longer) - logits).abs().max().item())

with anytime.Runner(model, example=tokens, macs=cost.macs) as runner:
    answer = runner.predict(tokens, deadline="5s")
    print(f"by a deadline of 5 s: exit {answer.exit}, labels {answer.labels.tolist()}")
    answer = runner.predict(tokens, budget=anytime.Budget(macs=cost.macs[0]))
    print(f"for {cost.macs[0] / 1e6:.1f} million MACs per text: exit {answer.exit}")
