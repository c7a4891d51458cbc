"""A text's hidden states are the same in company and alone, whatever shares its row."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.models.forest import Segment, plant, predictors

PAIR = [Segment([5, 6, 7]), Segment([8, 9], 0), Segment([10], 0)]
LONELY = [Segment([11, 12]), Segment([13, 14, 15, 16])]


def test_a_pair_by_hand():
    forest = plant([PAIR], pad_id=0)
    assert forest.ids.tolist() == [[5, 6, 7, 8, 9, 10]]
    assert forest.positions.tolist() == [[0, 1, 2, 3, 4, 3]]
    seen = [[int(x) for x in row] for row in forest.mask[0, 0].tolist()]
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
    rows, sources, targets, mask = predictors(forest.places[0][1:])
    assert rows.tolist() == [[0], [0]]
    assert mask.tolist() == [[True, True], [True, False]]
    assert sources[mask].tolist() == [2, 3, 2] and targets[mask].tolist() == [3, 4, 5]


def test_the_first_token_of_a_text_is_not_predicted():
    _, sources, targets, mask = predictors(plant([LONELY], pad_id=0).places[0])
    assert sources[mask].tolist() == [0, 2, 3, 4] and targets[mask].tolist() == [1, 3, 4, 5]


def test_grandchildren_see_the_whole_path():
    forest = plant([[Segment([5]), Segment([6], 0), Segment([7], 1), Segment([8], 0)]], pad_id=0)
    assert forest.mask[0, 0, 2].tolist() == [True, True, True, False]
    assert forest.mask[0, 0, 3].tolist() == [True, False, False, True]
    assert forest.positions.tolist() == [[0, 1, 2, 1]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_company_changes_nothing(build, disturb, family, together, attention):
    model = build(family, attention=attention)
    disturb(model)
    rows = [PAIR, LONELY]
    forest = plant(rows, pad_id=0, together=together)
    hidden = model.read(forest, "policy")
    texts = [(0, 1, [5, 6, 7, 8, 9]), (0, 2, [5, 6, 7, 10]), (1, 0, [11, 12]), (1, 1, [13, 14, 15, 16])]
    for row, segment, ids in texts:
        alone = model.read(plant([[Segment(ids)]], pad_id=0, together=False), "policy")[0]
        place = forest.places[row][segment]
        own = hidden[place.row, place.start : place.end]
        assert torch.allclose(own, alone[-len(own) :], atol=1e-5)


def test_logprobs_and_their_gradients_equal_those_of_texts_alone(build, disturb):
    model = build("llama")
    disturb(model)
    forest = plant([PAIR], pad_id=0)
    logprobs, mask = model.segment_logprobs(forest, forest.places[0][1:], "policy")
    alone = []
    for ids, start in (([5, 6, 7, 8, 9], 3), ([5, 6, 7, 10], 3)):
        one = plant([[Segment(ids)]], pad_id=0)
        found, _ = model.segment_logprobs(one, one.places[0], "policy")
        alone.append(found[0, start - 1 :])
    assert torch.allclose(logprobs[mask], torch.cat(alone), atol=1e-5)
    parameters = model.parameters_of("policy")
    ours = torch.autograd.grad(logprobs[mask].sum(), parameters, allow_unused=True)
    theirs = torch.autograd.grad(torch.cat(alone).sum(), parameters, allow_unused=True)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def test_tokens_are_counted_without_padding():
    rows = [PAIR, LONELY, [Segment([5])]]
    for together, count in ((True, 13), (False, 9 + 6 + 1)):
        assert plant(rows, pad_id=0, together=together).tokens == count
