# Owner(s): ["oncall: cpu inductor"]
"""Training of recurrent layers on CPU under torch.compile with default settings."""

import copy
import random

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.test_case import run_tests, TestCase
from torch.nn.utils.rnn import pack_padded_sequence
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint


torch.set_num_threads(1)  # small layers, for which a second only waits

KINDS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM_proj": (nn.LSTM, {"proj_size": 5}),
    "GRU": (nn.GRU, {}),
    "RNN_TANH": (nn.RNN, {}),
    "RNN_RELU": (nn.RNN, {"nonlinearity": "relu"}),
}
all_kinds = parametrize("kind", list(KINDS))
# Inductor, which is slow to compile, for the two kernels.
BACKENDS = [
    *((kind, "aot_eager") for kind in KINDS),
    ("LSTM", "inductor"),
    ("GRU", "inductor"),
]


def make(kind, *args, **kwargs):
    cls, extra = KINDS[kind]
    torch.manual_seed(0)
    return cls(*args, **extra, **kwargs)


def make_state(module, batch, dtype=torch.float32):
    layers = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or module.hidden_size, module.hidden_size]
    state = tuple(torch.randn(layers, batch, s, dtype=dtype) for s in sizes)
    return state if isinstance(module, nn.LSTM) else state[0]


def recorder(graphs):
    """A backend that keeps the forward and backward graphs that AOTAutograd makes."""

    def record(graph, _):
        graphs.append(graph)
        return graph

    return aot_autograd(fw_compiler=record, decompositions=select_decomp_table())


def calls(graph):
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


class Forecaster(nn.Module):
    def __init__(self, kind, hidden_size=8, num_layers=1):
        super().__init__()
        self.rnn = make(kind, 1, hidden_size, num_layers, batch_first=True)
        self.head = nn.Linear(self.rnn.proj_size or hidden_size, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def waves(batch, seq_len):
    return torch.sin(torch.arange(seq_len) / 3 + torch.arange(batch)[:, None])[
        ..., None
    ]


class TestTraining(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()

    def assert_same_gradients(self, module, args, backend="aot_eager", loss=None):
        """Output and gradients of the compiled layer against eager in float64."""
        double = copy.deepcopy(module).double()
        results = []
        for layer, to in (
            (torch.compile(module, backend=backend, fullgraph=True), torch.float32),
            (double, torch.float64),
        ):
            inputs = pytree.tree_map(
                lambda t: t.detach().to(to).requires_grad_(t.requires_grad), args
            )
            owner = double if layer is double else module
            outputs = layer(*inputs)
            leaves = [
                t
                for t in (*owner.parameters(), *pytree.tree_leaves(inputs))
                if t.requires_grad
            ]
            used = outputs if loss is None else loss(outputs)
            total = sum(t.square().sum() for t in pytree.tree_leaves(used))
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
            results.append([*pytree.tree_leaves(outputs), *grads])
        ours, expected = results
        expected = [None if t is None else t.float() for t in expected]
        # What the loss does not depend on has no gradient, or one of zero.
        ours = [
            None if e is None and t is not None and not t.any() else t
            for t, e in zip(ours, expected)
        ]
        self.assertEqual(ours, expected, atol=2e-5, rtol=2e-5)

    @parametrize("kind,backend", BACKENDS)
    def test_gradients(self, kind, backend):
        module = make(kind, 6, 7, 2, bidirectional=True)
        state = pytree.tree_map(torch.Tensor.requires_grad_, make_state(module, 3))
        x = torch.randn(6, 3, 4, requires_grad=True).permute(2, 1, 0).detach()
        self.assert_same_gradients(module, (x.requires_grad_(), state), backend)

    @all_kinds
    def test_only_parameters_require_grad(self, kind):
        module = make(kind, 16, 32)
        self.assert_same_gradients(module, (torch.randn(5, 3, 16),))

    @all_kinds
    def test_only_the_input_requires_grad(self, kind):
        module = make(kind, 6, 7).requires_grad_(False)
        x = torch.randn(4, 3, 6, requires_grad=True)
        self.assert_same_gradients(module, (x,))

    @all_kinds
    def test_some_parameters_are_frozen(self, kind):
        module = make(kind, 6, 7, 2)
        module.weight_ih_l0.requires_grad_(False)
        module.bias_hh_l1.requires_grad_(False)
        self.assert_same_gradients(module, (torch.randn(4, 3, 6),))

    @all_kinds
    @parametrize("used", [0, 1])
    def test_loss_of_output_or_of_state_alone(self, kind, used):
        module = make(kind, 6, 7, 2, bidirectional=True, batch_first=True, bias=False)
        x = torch.randn(3, 4, 6, requires_grad=True)
        self.assert_same_gradients(module, (x,), loss=lambda outputs: outputs[used])

    @all_kinds
    def test_eval_with_grad_mode_on(self, kind):
        module = make(kind, 16, 32).eval()
        self.assert_same_gradients(module, (torch.randn(5, 3, 16),))

    @all_kinds
    def test_inference_graph_after_training(self, kind):
        """The graph without gradients has the operator that it had."""
        module = make(kind, 6, 7)
        x = torch.randn(4, 3, 6)
        graphs = []
        fn = torch.compile(module, backend=recorder(graphs), fullgraph=True)
        fn(x)
        with torch.no_grad():
            self.assertEqual(fn(x), module(x))
        names = [[t for t in calls(g) if "rnn_layer" in t] for g in graphs]
        served = kind == "LSTM" and torch._C._get_mkldnn_enabled()
        self.assertEqual(names[0], ["torch_rnn.rnn_layer_train.default"])
        self.assertEqual(
            names[-1],
            [
                "aten.mkldnn_rnn_layer.default"
                if served
                else "torch_rnn.rnn_layer.default"
            ],
        )

    @all_kinds
    def test_graphs_do_not_depend_on_the_length(self, kind):
        sizes = []
        for seq_len in (3, 40):
            torch._dynamo.reset()
            graphs = []
            module = make(kind, 6, 7, 2, bidirectional=True)
            fn = torch.compile(module, backend=recorder(graphs), fullgraph=True)
            fn(torch.randn(seq_len, 3, 6))[0].sum().backward()
            forward, backward = (calls(g) for g in graphs)
            self.assertEqual(sum("rnn_layer_train." in t for t in forward), 4)
            self.assertEqual(sum("rnn_layer_train_backward" in t for t in backward), 4)
            sizes.append((len(forward), len(backward)))
        self.assertEqual(sizes[0], sizes[1])

    @all_kinds
    def test_graph_count(self, kind):
        """A static graph and a dynamic one for any number of lengths and batches."""
        module = make(kind, 6, 7, bidirectional=True)
        backend = CompileCounterWithBackend("aot_eager")
        fn = torch.compile(module, backend=backend, fullgraph=True)
        rng = random.Random(0)
        for _ in range(20):
            x = torch.randn(rng.randint(2, 40), rng.randint(2, 9), 6)
            grads = [
                torch.autograd.grad(f(x)[0].square().mean(), [*module.parameters()])
                for f in (fn, module)
            ]
            self.assertEqual(grads[0], grads[1], atol=1e-5, rtol=1e-5)
        self.assertLessEqual(backend.frame_count, 3)

    @all_kinds
    def test_forecaster_follows_eager(self, kind):
        eager = Forecaster(kind)
        ours = copy.deepcopy(eager)
        wave = waves(4, 31)
        losses = []
        for module, fn in (
            (eager, eager),
            (ours, torch.compile(ours, fullgraph=True)),
        ):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            curve = []
            for _ in range(50):
                optimizer.zero_grad()
                loss = (fn(wave[:, :-1]) - wave[:, 1:]).square().mean()
                loss.backward()
                optimizer.step()
                curve.append(loss.item())
            losses.append(curve)
        self.assertLess(losses[0][-1], losses[0][0])
        self.assertEqual(losses[1], losses[0], atol=1e-4, rtol=1e-4)

    @parametrize("kind,batch", [("LSTM", 97), ("GRU", 3), ("RNN_TANH", 3)])
    def test_long_forecast(self, kind, batch):
        """Two layers over 999 steps compile like any others."""
        module = Forecaster(kind, 51, 2)
        graphs = []
        fn = torch.compile(module, backend=recorder(graphs), fullgraph=True)
        wave = waves(batch, 1000)
        grads = [
            torch.autograd.grad(
                (f(wave[:, :-1]) - wave[:, 1:]).square().mean(), [*module.parameters()]
            )
            for f in (fn, module)
        ]
        self.assertEqual(grads[0], grads[1], atol=1e-4, rtol=1e-3)
        self.assertLess(sum(len(calls(g)) for g in graphs), 150)

    @all_kinds
    def test_dropout(self, kind):
        """Rate 1 leaves the second layer its biases; rate 0.5 a mask of its own a call."""
        x = torch.randn(6, 2, 16)
        module = make(kind, 16, 32, 3, dropout=1.0).train()
        fn = torch.compile(module, backend="aot_eager", fullgraph=True)
        self.assertEqual(fn(x)[0], module(x)[0])
        module = make(kind, 16, 32, 3, dropout=0.5).train()
        fn = torch.compile(module, backend="aot_eager", fullgraph=True)
        first, second = fn(x)[0], fn(x)[0]
        self.assertNotEqual(first, second)
        first.sum().backward()
        self.assertTrue(all(p.grad.isfinite().all() for p in module.parameters()))
        module.eval()
        self.assertEqual(fn(x)[0], module(x)[0])

    def test_dropout_mean(self):
        """The mask in training keeps the mean, through gradients as through output."""
        module = nn.RNN(300, 300, 2, nonlinearity="relu", dropout=0.25, bias=False)
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(torch.eye(300) if "ih" in name else torch.zeros(300, 300))
        x = torch.ones(1, 60, 300, requires_grad=True)
        output = torch.compile(module, backend="aot_eager", fullgraph=True)(x)[0]
        (grad,) = torch.autograd.grad(output.sum(), x)
        self.assertEqual(output.mean().item(), 1, atol=0.02, rtol=0)
        self.assertEqual(grad, output)

    @all_kinds
    def test_updated_parameters_are_used(self, kind):
        module = make(kind, 6, 7)
        fn = torch.compile(module, backend="aot_eager", fullgraph=True)
        x = torch.randn(4, 3, 6)
        for _ in range(3):
            output = fn(x)[0]
            self.assertEqual(output, module(x)[0])
            output.sum().backward()
            with torch.no_grad():
                for p in module.parameters():
                    p.sub_(p.grad)

    @all_kinds
    def test_checkpoint(self, kind):
        module = make(kind, 6, 7)

        def fn(x):
            return checkpoint(lambda x: module(x)[0].sin(), x, use_reentrant=False)

        x = torch.randn(4, 3, 6, requires_grad=True)
        leaves = [x, *module.parameters()]
        results = [
            torch.autograd.grad(f(x).sum(), leaves)
            for f in (torch.compile(fn, backend="aot_eager", fullgraph=True), fn)
        ]
        self.assertEqual(results[0], results[1], atol=1e-5, rtol=1e-5)

    @parametrize("backend", ["aot_eager", "inductor"])
    def test_saved_tensors_on_cpu(self, backend):
        """Hooks that copy what is saved lose oneDNN's workspace, and no gradient."""
        module = make("LSTM", 6, 7)
        fn = torch.compile(module, backend=backend, fullgraph=True)
        x = torch.randn(4, 3, 6)
        with torch.autograd.graph.save_on_cpu():
            loss = fn(x)[0].square().sum()
        actual = torch.autograd.grad(loss, [*module.parameters()])
        loss = module(x)[0].square().sum()
        expected = torch.autograd.grad(loss, [*module.parameters()])
        self.assertEqual(actual, expected, atol=1e-5, rtol=1e-5)

    @all_kinds
    @parametrize("why", ["bfloat16", "autocast", "vmap"])
    def test_left_to_eager(self, kind, why):
        """Where capture is slower or unknown, eager runs between compiled parts."""
        dtype = torch.bfloat16 if why == "bfloat16" else torch.float32
        module = make(kind, 6, 7, dtype=dtype)
        x = torch.randn(2, 4, 3, 6, dtype=dtype)
        backend = CompileCounterWithBackend("aot_eager")

        def fn(x):
            if why == "vmap":
                y = torch.func.vmap(lambda t: module(t)[0])(x * 2)
            else:
                y = module(x[0] * 2)[0]
            return y.sin()

        with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
            try:
                expected = fn(x)
            except RuntimeError as e:
                with self.assertRaisesRegex(RuntimeError, ".") as ours:
                    torch.compile(fn, backend=backend)(x)
                self.assertEqual(str(ours.exception), str(e))
                return
            self.assertEqual(torch.compile(fn, backend=backend)(x), expected)
        self.assertFalse(
            any("rnn" in str(n.target) for g in backend.graphs for n in g.graph.nodes)
        )

    @all_kinds
    @torch._dynamo.config.patch(allow_rnn=True)
    def test_autocast_if_asked_for(self, kind):
        module = make(kind, 6, 7)
        x = torch.randn(4, 3, 6)
        fn = torch.compile(module, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = fn(x)[0].float().square().sum()
        actual = torch.autograd.grad(loss, [*module.parameters()])
        loss = module(x)[0].square().sum()
        for a, e in zip(actual, torch.autograd.grad(loss, [*module.parameters()])):
            error = torch.linalg.vector_norm(a - e) / torch.linalg.vector_norm(e)
            self.assertLess(error.item(), 0.05)


class TestBadInput(TestCase):
    """The compiled module raises what eager raises."""

    def bad_inputs(self, module):
        x = torch.randn(4, 3, 16)
        lstm = isinstance(module, nn.LSTM)
        h = torch.zeros(1, 3, module.proj_size or 32)
        c = torch.zeros(1, 3, 32)

        def state(change, hidden_only=False):
            if not lstm:
                return change(h)
            return change(h), c if hidden_only else change(c)

        packed = pack_padded_sequence(x, [4, 3, 2])
        cases = {
            "batch": (x, state(lambda s: s[:, :2])),
            "layers": (x, state(lambda s: torch.cat([s, s]))),
            "hidden size": (x, state(lambda s: s[..., 1:], True)),
            "state rank": (x, state(lambda s: s[0])),
            "state dtype": (x, state(torch.Tensor.double)),
            "state device": (x, state(lambda s: s.to("meta"))),
            "width": (x[..., :15],),
            "unbatched width": (x[:, 0, :15],),
            "rank": (x[None],),
            "dtype": (x.double(),),
            "integer": (x.long(),),
            "device": (x.to("meta"),),
            "no time step": (x[:0],),
            "packed batch": (packed, state(lambda s: s[:, :2])),
            "packed width": (pack_padded_sequence(x[..., :15], [4, 3, 2]),),
        }
        if lstm:
            cases["cell size"] = (x, (h, c[..., 1:]))
            cases["no cell"] = (x, (h,))
        else:
            cases["a pair"] = (x, (h, h))
        return cases

    @all_kinds
    @parametrize("grad", [False, True])
    def test_bad_input(self, kind, grad):
        self.check(make(kind, 16, 32), grad)

    def test_no_time_step_in_inductor(self):
        """The one that is found when the compiled code runs."""
        for kind in KINDS:
            self.check(make(kind, 16, 32), True, "inductor", ["no time step"])

    def check(self, module, grad, backend="aot_eager", names=None):
        for name, args in self.bad_inputs(module).items():
            if names is not None and name not in names:
                continue
            with self.subTest(name), torch.set_grad_enabled(grad):
                torch._dynamo.reset()
                with self.assertRaises(Exception) as eager:
                    module(*args)
                with self.assertRaises(Exception) as ours:
                    torch.compile(module, backend=backend)(*args)
                self.assertIs(type(ours.exception), type(eager.exception))
                self.assertEqual(str(ours.exception), str(eager.exception))


instantiate_parametrized_tests(TestTraining)
instantiate_parametrized_tests(TestBadInput)

if __name__ == "__main__":
    run_tests()
