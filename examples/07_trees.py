"""Gradient boosting and random forests that answer by a deadline: cut into exits, compared by rule, and as a classifier.

python examples/07_trees.py
"""

import argparse

from sklearn.datasets import load_digits
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.model_selection import train_test_split

import anytime
from anytime.integrations.sklearn import AnytimeClassifier
from anytime.models import TreeExits


def main(small: bool) -> None:
    """Cut a fitted forest, then fit boosting that keeps deadlines."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.4, stratify=y, random_state=0)

    # Trees that are fitted already: exits after 12, 25, ... of 100 trees. The last exit is the forest itself.
    forest = RandomForestClassifier(100, random_state=0).fit(x_train, y_train)
    model = TreeExits(forest, exits=8)
    found = anytime.evaluate(model(x_test), y_test, costs=model.rounds)
    print(f"random forest, exits after {', '.join(map(str, model.rounds))} trees")
    for rule, metrics in found.rules.items():
        print(
            f"  {rule:8} accuracy {metrics.accuracy[0]:.3f} to {metrics.accuracy[-1]:.3f}, "
            f"{metrics.label_drop_percent['0.1']:.1f} % of inputs drop by .1, ECE at the last exit {metrics.ece[-1]:.3f}"
        )

    # In the style of scikit-learn, for boosting: train, cut and fit temperatures in one call.
    boosting = HistGradientBoostingClassifier(max_iter=10 if small else 100, random_state=0)
    trees = AnytimeClassifier(boosting, exits=8, calibrate=0.2, random_state=0).fit(x_train, y_train)
    trees.warm_up(x_test[:1])
    print(f"boosting: accuracy {trees.score(x_test, y_test):.3f} without a deadline")
    print(f"one image of a {y_test[0]}, 1 s: {trees.predict(x_test[:1], deadline='1s')[0]}")
    for deadline in ("2ms", "5ms", "50ms"):
        try:
            answer = trees.runner_.predict(x_test[:1], deadline=deadline)  # the same, with what happened
        except (anytime.DeadlineTooShort, anytime.Overloaded):
            print(f"one image, {deadline}: no answer, not even of the first exit")
        else:
            rounds = trees.model_.rounds[answer.exit - 1]
            print(f"one image, {deadline}: {trees.classes_[answer.label]} after {rounds} rounds, {1e3 * answer.elapsed:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="fewer trees, for a quick look")
    main(parser.parse_args().small)
