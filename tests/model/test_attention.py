"""Attention: its equation, blocks, recomputation and hand-written derivatives."""

import pytest
import torch
from test_model import as_if_trained, packed

from pointup.model.attention import RelativeAttention
from pointup.model.offsets import encode_positions, offset_along


def test_attention_equals_its_equation():
    torch.manual_seed(0)
    heads, dim, hidden = 2, 3, 4
    layer = RelativeAttention(6, heads, hidden, concat=True, beta=False, dropout=0.0)
    x, features = torch.randn(5, 2, 6), torch.randn(5, 6)
    index = torch.randint(0, 5, (5, 3))
    missing = torch.zeros(5, 3, dtype=torch.bool)
    missing[1, 2] = True
    g = torch.randn(5, 2, 3, hidden)
    k, v = layer.key_value(features).view(5, 2, heads, dim).unbind(1)
    q = layer.query(x).view(5, 2, heads, dim)
    expected = torch.zeros(5, 2, heads, dim)
    for n in range(5):
        neighbors = [j for j in range(3) if not missing[n, j]]
        for m in range(2):
            for h in range(heads):
                keys = [k[index[n, j], h] + layer.position_key[h] @ g[n, m, j] for j in neighbors]
                values = [
                    v[index[n, j], h] + g[n, m, j] @ layer.position_value[h] for j in neighbors
                ]
                weights = (torch.stack(keys) @ q[n, m, h] / dim**0.5).softmax(0)
                expected[n, m, h] = weights @ torch.stack(values)
    expected = layer.out(expected.flatten(2))
    kv = layer.key_value(features)[index]
    torch.testing.assert_close(layer(x, kv, missing, g), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_blocks_and_recomputation_do_not_change_results(dropout, monkeypatch):
    pos, ptr = packed(40, 3)
    results = []
    for children_kept, per_block in ((10**6, 16), (0, 16)):
        model = as_if_trained(dropout=dropout).train()
        monkeypatch.setattr("pointup.model.upsampler.children_kept", lambda _, n=children_kept: n)
        monkeypatch.setattr("pointup.model.children.children_per_block", lambda _, n=per_block: n)
        torch.manual_seed(1)
        output = model(pos, ptr, 2.0)
        candidates = output.candidates
        made = (candidates, output.log_shares, output.log_quotas)
        sum(values.square().sum() for values in made).backward()
        results.append([candidates.detach(), *(weight.grad for weight in model.parameters())])
        monkeypatch.undo()
    torch.testing.assert_close(*results)
    if not dropout:
        torch.testing.assert_close(as_if_trained()(pos, ptr, 2.0).candidates, results[0][0])


def test_handwritten_derivatives_equal_finite_differences():
    torch.manual_seed(0)
    layer = RelativeAttention(4, 2, 3, concat=True, beta=True, dropout=0.0).double()
    missing = torch.zeros(3, 2, dtype=torch.bool)
    missing[1, 1] = True
    for shape in ((3, 2, 3), (3, 2, 2, 3)):
        inputs = [torch.randn(3, 2, 4), torch.randn(3, 2, 8), torch.randn(shape)]
        inputs = [values.double().requires_grad_() for values in inputs]
        assert torch.autograd.gradcheck(lambda x, kv, g: layer(x, kv, missing, g), inputs)
    directions, positions = torch.randn(3, 2, 8).double(), torch.randn(3, 2, 5, 4).double()
    inputs = [directions.requires_grad_(), positions.requires_grad_()]
    assert torch.autograd.gradcheck(offset_along, inputs)
    inputs = [torch.randn(4, 3, 2, 5).double(), torch.randn(4, 4).double()]
    inputs = [values.requires_grad_() for values in inputs]
    assert torch.autograd.gradcheck(encode_positions, inputs)
