"""What changed on the page since its first version, and why; the numbers are those of the first version."""

from __future__ import annotations

CHANGES: tuple[tuple[str, str, str, str], ...] = (
    (
        "accuracy, label-drops, final-answer-drops, correctness, overthinking, learn-and-forget, entropy-rise, "
        "marginal-and-conditional, trajectories, tiny-imagenet, entropy in uncertainty, calibration-gap",
        "MSDNet on CIFAR-100: five networks on 45,000 images with a cosine schedule",
        "three by the published schedule on 49,500 images; the five stay where validation rows or many logits are needed",
        "their product and caching were 1.1 to 2 points less accurate than the paper's: it was not the paper's training",
    ),
    (
        "accuracy, correctness",
        "MSDNet on CIFAR-100 within 2 points, the table within 2.5: no miss",
        "within 1 and 1.5 points: one miss, the first exit",
        "2 points accept the other training as well",
    ),
    (
        "trajectories",
        "claim: the product's probabilities start lower",
        "claim: its mean drop is at most a tenth of the backbone's",
        "with a power of 1/7 at exit 1 they do by definition",
    ),
    (
        "ablation, sigmoid, deviations",
        "claims with criteria that were not stated, and one about a change of a point",
        "criteria stated; the claim asks which weights are nearer to the paper's number",
        "a reader could not tell what would have failed",
    ),
    (
        "text",
        "bounds of our own counted as numbers of the paper",
        "counted apart",
        "the paper has no such numbers",
    ),
    (
        "deviations, out-of-scope",
        "spread of set sizes over random seeds with the library's quantile; out-of-scope said to have the released code's",
        "the spread with the released code's quantile; out-of-scope is said to have an exact one",
        "a second implementation from our notes disagreed",
    ),
    (
        "all figures",
        "six colours, which repeated, and in some figures two rules in the same colour",
        "ten colours; no other rule takes those of the backbone, caching and the product",
        "two lines could not be told apart",
    ),
    (
        "uncertainty, set-size-rise",
        "one calibration split for all seeds",
        "20 random splits per seed, mean and deviation over seeds and splits",
        "over splits a mean size varies by about as much as the tolerance, so one split decided what was within",
    ),
    (
        "collaboration",
        "claims about accuracy with an oracle, and about the recall of class 0",
        "AUROC of confidence for correctness at each exit; one claim, which does not hold",
        "with .5 % deferred the measure is the accuracy plus at most half a point, and its claim could not fail; the other one "
        "is arithmetic",
    ),
    (
        "regression",
        "a curve of our own; of the test points 87.5 to 75.0 % covered",
        "the paper's data; learning rate decays to zero in float64; table of coverage against empty support",
        "the data could be had, and the claims have to be the same on any machine",
    ),
    (
        "label-drops",
        "within 2.5 points: 57 of 59 numbers",
        "within 2.5 points and 25 % of the paper's value",
        "2.5 points accept any small percentage: 1.73 % passed for 1.1 %",
    ),
    (
        "accuracy, label-drops, uncertainty, calibration-gap, finetune, marginal-and-conditional",
        "181 comparisons, some of them of one number: exit 1 under several rules, bounds as rows of their own, figures 1 and 6 "
        "again",
        "every number is compared once",
        "a miss counted up to three times",
    ),
    (
        "budgeted-batch",
        "confidences as float32 probabilities, later log-odds; claims about the smallest and largest costs",
        "log-odds; the paper's claims: ahead at most costs, and drops again at the largest",
        "a third of the backbone's confidences were exactly 1 and stopped together",
    ),
    (
        "sigmoid",
        "labels from rounded probabilities",
        "labels from the evidence, before rounding",
        "several classes had equal float32 probabilities in two thirds of the rows, and the first of them was answered",
    ),
    (
        "spiral, regression, ablation, static-threshold, deviations, learn-and-forget, trajectories",
        "claims that are theorems, definitions, or repeat another study",
        "moved to the tests, or stated in the notes",
        "a claim that cannot fail shows nothing",
    ),
    (
        "accuracy, label-drops, correctness, uncertainty, zero-time-waste, dvit, l2w",
        "some of the paper's claims were left out",
        "added: product against caching, final answers of L2W and DViT, ZTW's geometric ensemble, the table's trade-off, sets "
        "that vary less",
        "the paper makes them",
    ),
    (
        "adaptive-threshold, text",
        "no word on collapsed rows, nor on TREC's exit weights",
        "said in the notes",
        "both change the numbers: rows that collapse fall back to the softmax, and TREC was trained again after a bound on "
        "test rows had failed",
    ),
    (
        "finetune, calibration-gap",
        "heads trained for one epoch, a dose found on test rows",
        "the paper's schedule on the whole network, chosen on validation rows; the heads stay in the table, without a claim",
        "it was not the paper's method",
    ),
)
"""Studies, what the page had, what it has, and why."""
