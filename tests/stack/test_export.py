"""torch.export and ONNX: eval exports as the plain network, without a trace of noise."""

import io

import onnxruntime
import pytest
import torch
from torch import nn

import ghostnoise
from support.converted import PLAIN_AT_INFERENCE, converted
from support.models import images, tokens, trained, transformer


def targets(exported):
    return [str(node.target) for node in exported.graph.nodes]


@pytest.mark.parametrize("method", PLAIN_AT_INFERENCE)
def test_eval_exports_as_plain_batch_norm(method):
    model, x = converted(method).eval(), images()
    exported = torch.export.export(model, (x,))
    theirs = torch.export.export(trained().eval(), (x,))
    assert targets(exported) == targets(theirs)
    assert torch.equal(exported.module()(x), model(x))


def test_inserted_noise_is_not_exported():
    model, x = ghostnoise.convert(transformer(), "gni", 4, after=nn.LayerNorm).eval(), tokens()
    exported = torch.export.export(model, (x,))
    theirs = torch.export.export(transformer().eval(), (x,))
    assert targets(exported) == targets(theirs)


@pytest.mark.parametrize("method", ["gni", "en"])
@pytest.mark.parametrize("strict", [True, False])
def test_any_batch_size(method, strict):
    torch._dynamo.reset()
    model = converted(method).eval()
    sizes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model, (images(),), dynamic_shapes=sizes, strict=strict).module()
    for batch_size in (1, 5, 8):
        torch.testing.assert_close(exported(images(batch_size)), model(images(batch_size)))


@pytest.mark.parametrize("method", ["gni", "en"])
def test_onnx(method):
    model = converted(method).eval()
    program, file = torch.onnx.export(model, (images(),), dynamo=True, verbose=False), io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: images().numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(images()))
    kinds = {node.op_type for node in program.model_proto.graph.node}
    assert not any("Random" in kind or "Gather" in kind for kind in kinds)
    if method == "gni":  # folded into the convolution, as plain batch norm is
        assert kinds == {"Conv", "Relu", "ReduceMean", "Reshape", "Gemm"}
