# Owner(s): ["oncall: cpu inductor"]
"""torch_rnn::rnn_layer_train, a recurrent layer that keeps what its backward needs."""

import torch
import torch._decomp.decompositions_for_rnn_train
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


SHAPE = 4, 2, 3  # time steps, batch, input
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
all_kinds = parametrize("kind", ["LSTM", "LSTM_proj", "GRU", "RNN_TANH", "RNN_RELU"])
layer = torch.ops.torch_rnn.rnn_layer_train


def make_args(kind, bias=True, dtype=torch.float64, shape=SHAPE, size=5):
    """input, weights, hx, cx, mode, all tensors requiring grad."""
    torch.manual_seed(0)
    mode = kind.removesuffix("_proj")
    gates, output_size = GATES[mode] * size, 2 if kind == "LSTM_proj" else size
    shapes = [(gates, shape[2]), (gates, output_size), *[(gates,)] * (2 * bias)]
    if output_size != size:
        shapes.append((output_size, size))
    # A tensor of its own for each, so that gradcheck sees every gradient.
    weights = [torch.randn(s, dtype=dtype) / size**0.5 for s in shapes]
    x = torch.randn(shape, dtype=dtype)
    hx = torch.randn(shape[1], output_size, dtype=dtype)
    cx = torch.randn(shape[1], size, dtype=dtype) if mode == "LSTM" else None
    for t in (x, *weights, hx, *([] if cx is None else [cx])):
        t.requires_grad_()
    return x, weights, hx, cx, mode


def leaves(args):
    x, weights, hx, cx, _ = args
    return [x, hx, *([] if cx is None else [cx]), *weights]


def cast(args, dtype):
    x, weights, hx, cx, mode = args
    x, hx, cx, *weights = (
        None if t is None else t.detach().to(dtype).requires_grad_()
        for t in (x, hx, cx, *weights)
    )
    return x, weights, hx, cx, mode


def used_outputs(args, *options):
    outputs = layer(*args, *options)
    return outputs[:3] if args[3] is not None else outputs[:2]


class TestLayerTrain(TestCase):
    @all_kinds
    @parametrize("bias", [False, True])
    @parametrize("reverse", [False, True])
    def test_gradcheck(self, kind, bias, reverse):
        args = make_args(kind, bias)

        def fn(x, hx, *rest):
            cx, weights = (rest[0], rest[1:]) if args[3] is not None else (None, rest)
            return used_outputs((x, weights, hx, cx, args[4]), bias, reverse, False)

        self.assertTrue(torch.autograd.gradcheck(fn, leaves(args)))

    @all_kinds
    @parametrize("reverse", [False, True])
    def test_same_as_the_layer_in_inference(self, kind, reverse):
        args = make_args(kind)
        actual = used_outputs(args, True, reverse, False)
        expected = torch.ops.torch_rnn.rnn_layer(*args, True, reverse)
        self.assertEqual(actual, expected[: len(actual)])

    @parametrize("bias", [False, True])
    @parametrize("reverse", [False, True])
    def test_onednn(self, bias, reverse):
        """oneDNN in float32 against the time loop in float64."""
        args = make_args("LSTM", bias)
        single = cast(args, torch.float32)
        expected = used_outputs(args, bias, reverse, False)
        actual = used_outputs(single, bias, reverse, True)
        self.assertEqual(actual, [t.float() for t in expected], atol=1e-5, rtol=1e-5)
        grads = [torch.randn_like(t) for t in expected]
        expected = torch.autograd.grad(expected, leaves(args), grads)
        actual = torch.autograd.grad(actual, leaves(single), [g.float() for g in grads])
        self.assertEqual(actual, [t.float() for t in expected], atol=1e-5, rtol=1e-5)

    @parametrize("onednn", [False, True])
    def test_saved_tensors_may_be_copied(self, onednn):
        """A copy of the reserve has no workspace of oneDNN behind it."""
        args = make_args("LSTM", dtype=torch.float32)
        expected = used_outputs(args, True, False, onednn)[0].square().sum()
        expected = torch.autograd.grad(expected, leaves(args))
        with torch.autograd.graph.save_on_cpu():
            actual = used_outputs(args, True, False, onednn)[0].square().sum()
        actual = torch.autograd.grad(actual, leaves(args))
        self.assertEqual(actual, expected)

    @all_kinds
    @parametrize("onednn", [False, True])
    def test_gradients_of_some_outputs(self, kind, onednn):
        """A loss of any subset of the outputs, by gradients that are not contiguous."""
        if onednn and kind != "LSTM":
            return
        dtype = torch.float32 if onednn else torch.float64
        args = make_args(kind, dtype=dtype)
        reference = cast(args, torch.float64)
        expected = torch.ops.torch_rnn.rnn_layer(*reference, True, False)
        actual = used_outputs(args, True, False, onednn)
        for used in range(1, 2 ** len(actual)):
            losses = []
            for outputs in (actual, expected):
                loss = 0
                for i, output in enumerate(outputs):
                    if used & 1 << i:
                        # sum() hands an expanded scalar to the layer, transpose a
                        # gradient of other strides.
                        weight = torch.linspace(0, 1, output.numel(), dtype=dtype)
                        shape = output.transpose(0, 1).shape
                        weight = weight.view(shape).to(output.dtype)
                        loss = loss + output.sum()
                        loss = loss + (output.transpose(0, 1) * weight).sum()
                losses.append(loss)
            ours = torch.autograd.grad(losses[0], leaves(args), retain_graph=True)
            theirs = torch.autograd.grad(
                losses[1], leaves(reference), retain_graph=True
            )
            self.assertEqual(ours, [t.to(dtype) for t in theirs], atol=1e-5, rtol=1e-5)

    @all_kinds
    @parametrize("onednn", [False, True])
    def test_input_without_grad(self, kind, onednn):
        if onednn and kind != "LSTM":
            return
        args = make_args(kind, dtype=torch.float32)
        expected = used_outputs(args, True, False, onednn)[0].square().sum()
        expected = torch.autograd.grad(expected, leaves(args))[1:]
        args = args[0].detach(), *args[1:]
        actual = used_outputs(args, True, False, onednn)[0].square().sum()
        actual = torch.autograd.grad(actual, leaves(args)[1:])
        self.assertEqual(actual, expected)

    @all_kinds
    @parametrize("onednn", [False, True])
    def test_opcheck(self, kind, onednn):
        if onednn and kind != "LSTM":
            return
        args = make_args(kind, dtype=torch.float32)
        torch.library.opcheck(layer.default, (*args, True, True, onednn))

    @all_kinds
    @parametrize("onednn", [False, True])
    def test_opcheck_backward(self, kind, onednn):
        if onednn and kind != "LSTM":
            return
        *args, mode = cast(make_args(kind, dtype=torch.float32), torch.float32)
        with torch.no_grad():
            outputs = layer(*args, mode, True, False, onednn)
        args = [[w.detach() for w in a] if isinstance(a, list) else a for a in args]
        args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        for input_grad in (False, True):
            torch.library.opcheck(
                torch.ops.torch_rnn.rnn_layer_train_backward.default,
                (torch.ones_like(outputs[0]), None, None, *args, *outputs)
                + (mode, True, False, onednn, input_grad),
                test_utils=("test_schema", "test_faketensor"),
            )

    @parametrize("kind", ["LSTM", "LSTM_proj", "GRU", "RNN_TANH"])
    @parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision(self, kind, dtype):
        """No further from float64 than ATen's own layer and its derivative are.

        Not relu: an element that rounds to the other side of its kink decides there."""
        args = make_args(kind, dtype=dtype, shape=(20, 8, 16), size=32)
        reference = cast(args, torch.float64)
        results = []
        for fn, a, options in (
            (layer, args, (True, False, False)),
            (torch.ops.torch_rnn.rnn_layer, args, (True, False)),
            (torch.ops.torch_rnn.rnn_layer, reference, (True, False)),
        ):
            output = fn(*a, *options)[0]
            grads = torch.autograd.grad(output, leaves(a), torch.ones_like(output))
            self.assertEqual({g.dtype for g in grads}, {a[0].dtype})
            results.append([output, *grads])
        norm = torch.linalg.vector_norm
        ours, aten = (
            sum(norm(t.double() - e) / norm(e) for t, e in zip(result, results[2]))
            for result in results[:2]
        )
        self.assertLessEqual(ours.item(), 1.5 * aten.item())

    @all_kinds
    def test_sizes_of_one_and_zero(self, kind):
        for shape in ((1, 2, 3), (4, 1, 3), (1, 1, 3), (4, 0, 3)):
            args = make_args(kind, shape=shape)
            actual = used_outputs(args, True, False, False)
            expected = torch.ops.torch_rnn.rnn_layer(*args, True, False)
            self.assertEqual(actual, expected[: len(actual)])
            actual = torch.autograd.grad(actual[0].sum(), leaves(args))
            expected = torch.autograd.grad(expected[0].sum(), leaves(args))
            self.assertEqual(actual, expected)

    @all_kinds
    def test_inconsistent_sizes(self, kind):
        x, weights, hx, cx, mode = make_args(kind)
        for message, args in (
            ("larger than 0", (x[:0], weights, hx, cx, mode)),
            ("hx has batch 1", (x, weights, hx[:1], cx, mode)),
            (r"weights\[0\] must be", (x[..., 1:], weights, hx, cx, mode)),
            ("weights must hold", (x, weights[:1], hx, cx, mode)),
            ("mode must be", (x, weights, hx, cx, "lstm")),
        ):
            with self.assertRaisesRegex(RuntimeError, message):
                layer(*args, True, False, False)

    def test_float32_beside_autocast(self):
        args = make_args("GRU", dtype=torch.float32)
        expected = layer(*args, True, False, False)
        with torch.autocast("cpu", torch.bfloat16):
            self.assertEqual(layer(*args, True, False, False), expected)


instantiate_parametrized_tests(TestLayerTrain)

if __name__ == "__main__":
    run_tests()
