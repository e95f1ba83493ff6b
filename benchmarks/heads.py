"""Does fp8compile keep the output heads of real models in high precision, and no other layers?

    pip install timm diffusers x-transformers transformers
    python -m benchmarks.heads                    # all models, about 10 minutes of one core
    python -m benchmarks.heads --only dit
    python -m benchmarks.heads --show

The table below names the output heads of every architecture. They were read in the model's source, not taken
from the results. Models are small and made from their configurations: no weights are loaded, nothing is
compiled and nothing runs (`fp8compile.explain`). The loss is outside of the graph. A head that is not found
would be in FP8; a layer that is wrongly taken for a head loses the speed of FP8.

During the study, the list of head names is empty, because a model may give its head any name. In the results,
`named` are the heads that the list would find. Convolutional heads are not studied.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.passes import classify

from . import machine
from .results import RESULTS
from .show import Progress, table

PATH = RESULTS / "heads.jsonl"  # not a .json: those are results of `benchmarks.train`
WORDS = 512


class Case(NamedTuple):
    heads: tuple[str, ...]
    build: Callable[[], tuple[nn.Module, dict[str, Any]]]  # -> the model, and the keyword arguments of a call


CASES: dict[str, Case] = {}


def case(name: str, heads: str, build: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    CASES[name] = Case(tuple(heads.split()), build)


def words(*shape: int) -> Tensor:
    return torch.zeros(shape or (2, 16), dtype=torch.long)


def noise(*shape: int) -> Tensor:
    return torch.zeros(shape)


# -- timm --


def of_timm(name: str, heads: str, size: int = 224, title: str = "", **settings: Any) -> None:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        import timm

        model = timm.create_model(name, pretrained=False, **settings)
        argument = model.forward.__code__.co_varnames[1]
        return model, {argument: noise(2, 3, size, size)}

    case(f"timm {title or name}", heads, build)


of_timm("vit_tiny_patch16_224", "head", depth=2)
of_timm("vit_tiny_patch16_224", "", title="vit without classes", depth=2, num_classes=0)
of_timm("vit_base_patch16_siglip_224", "", title="vit_siglip, attention pool", depth=2)
of_timm("vit_base_patch16_clip_224", "head", depth=2)
of_timm("deit_tiny_distilled_patch16_224", "head head_dist", depth=2)
of_timm("beit_base_patch16_224", "head", depth=2)
of_timm("eva02_tiny_patch14_224", "head", depth=2, num_classes=1000)
of_timm("cait_xxs24_224", "head", depth=2)
of_timm("xcit_nano_12_p16_224", "head", depth=2)
of_timm("crossvit_tiny_240", "head.0 head.1", size=240)
of_timm("swin_tiny_patch4_window7_224", "head.fc", depths=(1, 1, 2, 1))
of_timm("swinv2_tiny_window8_256", "head.fc", size=256, depths=(1, 1, 2, 1))
of_timm("convnext_atto", "head.fc")
of_timm("convnextv2_atto", "head.fc")
of_timm("mixer_s16_224", "head")
of_timm("resmlp_12_224", "head")
of_timm("gmlp_ti16_224", "head")
of_timm("resnet18", "fc")
of_timm("resnet18", "", title="resnet18 without classes", num_classes=0)
of_timm("vgg11", "head.fc")
of_timm("densenet121", "classifier")
of_timm("efficientnet_b0", "classifier")
of_timm("mobilenetv3_small_100", "classifier")
of_timm("regnety_002", "head.fc")
of_timm("hiera_tiny_224", "head.fc", stages=(1, 1, 1, 1))
of_timm("mvitv2_tiny", "head.fc")
of_timm("maxvit_pico_rw_256", "head.fc", size=256)
of_timm("coatnet_nano_rw_224", "head.fc")
of_timm("levit_128s", "head.linear head_dist.linear")
of_timm("poolformer_s12", "head.fc")
of_timm("caformer_s18", "head.fc.fc2")
of_timm("mobilevit_xxs", "head.fc", size=256)
of_timm("edgenext_xx_small", "head.fc")
of_timm("efficientformer_l1", "head head_dist")
of_timm("pvt_v2_b0", "head")
of_timm("twins_svt_small", "head")
of_timm("davit_tiny", "head.fc", depths=(1, 1, 1, 1))
# aux_head stays in high precision as well: the model takes the maximum over its tokens
of_timm("volo_d1_224", "head")
of_timm("mambaout_femto", "head.fc")
of_timm("tiny_vit_5m_224", "head.fc")
of_timm("sequencer2d_s", "head.fc")
of_timm("nest_tiny_jx", "head")
of_timm("focalnet_tiny_srf", "head.fc")

# -- transformers --

SMALL = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
TEXT = dict(vocab_size=WORDS, bos_token_id=1, eos_token_id=2, pad_token_id=0)
DECODER = dict(num_key_value_heads=2, use_cache=False, **SMALL, **TEXT)
VISION = dict(image_size=64, patch_size=16, **SMALL)
PIXELS = {"pixel_values": lambda: noise(2, 3, 64, 64)}
TOKENS = {"input_ids": words}
BOTH = {"input_ids": words, "decoder_input_ids": words}
BART = dict(
    d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4
)
BART |= dict(encoder_ffn_dim=256, decoder_ffn_dim=256, use_cache=False)
CONV = dict(conv_dim=(32, 32), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2)
CONV |= dict(num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4)


def of_transformers(
    model: str, config: str, heads: str, inputs: dict[str, Callable[..., Any]], **settings: Any
) -> None:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made, {name: make() for name, make in inputs.items()}

    case(f"transformers {model}", heads, build)


of_transformers("LlamaForCausalLM", "LlamaConfig", "lm_head", TOKENS, **DECODER)
of_transformers("LlamaModel", "LlamaConfig", "", TOKENS, **DECODER)
of_transformers("LlamaForSequenceClassification", "LlamaConfig", "score", TOKENS, num_labels=144, **DECODER)
of_transformers("Gemma2ForCausalLM", "Gemma2Config", "lm_head", TOKENS, head_dim=32,
                tie_word_embeddings=False, **DECODER)
of_transformers("Qwen3ForCausalLM", "Qwen3Config", "lm_head", TOKENS, head_dim=32, **DECODER)
of_transformers("MixtralForCausalLM", "MixtralConfig", "lm_head", TOKENS, num_local_experts=4, **DECODER)
of_transformers("GPT2LMHeadModel", "GPT2Config", "lm_head", TOKENS, n_embd=128, n_layer=2, n_head=4,
                use_cache=False, **TEXT)
of_transformers("GPT2Model", "GPT2Config", "", TOKENS, n_embd=128, n_layer=2, n_head=4, use_cache=False,
                **TEXT)
of_transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", "lm_head", TOKENS, use_cache=False, **SMALL, **TEXT)
of_transformers("MambaForCausalLM", "MambaConfig", "lm_head", TOKENS, hidden_size=128, num_hidden_layers=2,
                use_cache=False, **TEXT)
of_transformers("BertModel", "BertConfig", "", TOKENS, **SMALL, **TEXT)
of_transformers("BertForMaskedLM", "BertConfig", "cls.predictions.decoder", TOKENS, tie_word_embeddings=False,
                **SMALL, **TEXT)
of_transformers("BertForSequenceClassification", "BertConfig", "classifier", TOKENS, num_labels=144, **SMALL,
                **TEXT)
of_transformers("BertForPreTraining", "BertConfig", "cls.predictions.decoder cls.seq_relationship", TOKENS,
                **SMALL, **TEXT)
of_transformers("BertForQuestionAnswering", "BertConfig", "qa_outputs", TOKENS, **SMALL, **TEXT)
of_transformers("RobertaForSequenceClassification", "RobertaConfig", "classifier.out_proj", TOKENS,
                num_labels=144, **SMALL, **TEXT)
of_transformers("RobertaForMaskedLM", "RobertaConfig", "lm_head.decoder", TOKENS, tie_word_embeddings=False,
                **SMALL, **TEXT)
of_transformers("DistilBertForSequenceClassification", "DistilBertConfig", "classifier", TOKENS,
                num_labels=144, dim=128, n_layers=2, n_heads=4, hidden_dim=256, vocab_size=WORDS)
of_transformers("ElectraForPreTraining", "ElectraConfig", "discriminator_predictions.dense_prediction",
                TOKENS, embedding_size=128, **SMALL, **TEXT)
of_transformers("T5ForConditionalGeneration", "T5Config", "lm_head", BOTH, d_model=128, d_kv=32, d_ff=256,
                num_layers=2, num_heads=4, vocab_size=WORDS, use_cache=False, tie_word_embeddings=False)
of_transformers("BartForConditionalGeneration", "BartConfig", "lm_head", BOTH, **BART, **TEXT)
of_transformers("BartForSequenceClassification", "BartConfig", "classification_head.out_proj",
                {"input_ids": lambda: torch.tensor([[5, 6, 7, 2]] * 2)}, num_labels=144, **BART, **TEXT)
of_transformers("WhisperForConditionalGeneration", "WhisperConfig", "proj_out",
                {"input_features": lambda: noise(2, 80, 64), "decoder_input_ids": words},
                max_source_positions=32, **BART, **TEXT, decoder_start_token_id=1)
of_transformers("ViTForImageClassification", "ViTConfig", "classifier", PIXELS, num_labels=144, **VISION)
of_transformers("ViTModel", "ViTConfig", "", PIXELS, **VISION)
of_transformers("ViTMAEForPreTraining", "ViTMAEConfig", "decoder.decoder_pred", PIXELS,
                decoder_hidden_size=128, decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
                decoder_intermediate_size=256, **VISION)
of_transformers("Dinov2ForImageClassification", "Dinov2Config", "classifier", PIXELS, num_labels=144,
                **VISION)
of_transformers("CLIPVisionModelWithProjection", "CLIPVisionConfig", "visual_projection", PIXELS,
                projection_dim=128, **VISION)
of_transformers("CLIPTextModelWithProjection", "CLIPTextConfig", "text_projection", TOKENS,
                projection_dim=160, **SMALL, **TEXT)
of_transformers("CLIPModel", "CLIPConfig", "visual_projection text_projection", TOKENS | PIXELS,
                projection_dim=160, text_config=SMALL | TEXT, vision_config=VISION)
of_transformers("SwinForImageClassification", "SwinConfig", "classifier", PIXELS, image_size=64, patch_size=4,
                embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4, num_labels=144)
of_transformers("SegformerForSemanticSegmentation", "SegformerConfig", "", PIXELS, depths=[1, 1],
                num_encoder_blocks=2, hidden_sizes=[32, 64], num_attention_heads=[1, 2], sr_ratios=[2, 1],
                patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[4, 4], decoder_hidden_size=128)
of_transformers("YolosForObjectDetection", "YolosConfig",
                "class_labels_classifier.layers.2 bbox_predictor.layers.2", PIXELS, num_labels=143,
                **(VISION | dict(image_size=[64, 64], num_detection_tokens=16)))
of_transformers("Wav2Vec2ForCTC", "Wav2Vec2Config", "lm_head", {"input_values": lambda: noise(2, 4000)},
                mask_time_prob=0.0, **CONV, **SMALL, **TEXT)
of_transformers("HubertModel", "HubertConfig", "", {"input_values": lambda: noise(2, 4000)},
                mask_time_prob=0.0, **CONV, **SMALL, **TEXT)
of_transformers("ASTForAudioClassification", "ASTConfig", "classifier.dense",
                {"input_values": lambda: noise(2, 64, 64)}, max_length=64, num_mel_bins=64, num_labels=144,
                **SMALL)
of_transformers("MusicgenForCausalLM", "MusicgenDecoderConfig", "lm_heads.0 lm_heads.1",
                {"input_ids": lambda: words(4, 8)}, num_codebooks=2, ffn_dim=256, **(TEXT | SMALL),
                use_cache=False)
of_transformers("DecisionTransformerModel", "DecisionTransformerConfig",
                "predict_state predict_action.0 predict_return", {"states": lambda: noise(2, 8, 144),
                "actions": lambda: noise(2, 8, 16), "rewards": lambda: noise(2, 8, 1),
                "returns_to_go": lambda: noise(2, 8, 1), "timesteps": lambda: words(2, 8)}, state_dim=144,
                act_dim=16, hidden_size=128, n_layer=2, n_head=4, max_ep_len=64, use_cache=False)
of_transformers("PatchTSTForPrediction", "PatchTSTConfig", "head.projection",
                {"past_values": lambda: noise(2, 64, 3)}, context_length=64, patch_length=8, patch_stride=8,
                d_model=128, ffn_dim=256, num_attention_heads=4, num_hidden_layers=2, prediction_length=160,
                num_input_channels=3, loss="mse")

# -- diffusers --


def of_diffusers(model: str, heads: str, inputs: dict[str, Callable[[], Any]], **settings: Any) -> None:
    def build() -> tuple[nn.Module, dict[str, Any]]:
        import diffusers

        return getattr(diffusers, model)(**settings), {name: make() for name, make in inputs.items()}

    case(f"diffusers {model}", heads, build)


def time_step() -> Tensor:
    return torch.tensor([5, 9])


IMAGE = {"hidden_states": lambda: noise(2, 4, 16, 16), "timestep": time_step}
CAPTION = {"encoder_hidden_states": lambda: noise(2, 8, 128)}
WIDE = dict(num_attention_heads=4, attention_head_dim=32, num_layers=2)
of_diffusers("DiTTransformer2DModel", "proj_out_2", IMAGE | {"class_labels": time_step}, in_channels=4,
             out_channels=8, sample_size=16, num_embeds_ada_norm=1000, **WIDE)
of_diffusers("PixArtTransformer2DModel", "proj_out",
             IMAGE | CAPTION | {"added_cond_kwargs": lambda: {"resolution": None, "aspect_ratio": None}},
             in_channels=4, out_channels=8, sample_size=16, cross_attention_dim=128, caption_channels=128,
             use_additional_conditions=False, **WIDE)
of_diffusers("SD3Transformer2DModel", "proj_out",
             IMAGE | CAPTION | {"pooled_projections": lambda: noise(2, 64)}, sample_size=16, in_channels=4,
             out_channels=4, joint_attention_dim=128, caption_projection_dim=128, pooled_projection_dim=64,
             **WIDE)
of_diffusers("FluxTransformer2DModel", "proj_out", {"hidden_states": lambda: noise(2, 16, 64),
             "encoder_hidden_states": lambda: noise(2, 8, 128), "pooled_projections": lambda: noise(2, 64),
             "timestep": lambda: noise(2), "img_ids": lambda: noise(16, 3), "txt_ids": lambda: noise(8, 3)},
             in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=4,
             joint_attention_dim=128, pooled_projection_dim=64, guidance_embeds=False,
             axes_dims_rope=(8, 12, 12))
of_diffusers("AuraFlowTransformer2DModel", "proj_out", IMAGE | CAPTION, sample_size=16, in_channels=4,
             num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=32, num_attention_heads=4,
             joint_attention_dim=128, caption_projection_dim=128, out_channels=4, pos_embed_max_size=256)
of_diffusers("SanaTransformer2DModel", "proj_out", IMAGE | CAPTION, in_channels=4, out_channels=4,
             num_attention_heads=4, attention_head_dim=32, num_layers=2, num_cross_attention_heads=4,
             cross_attention_head_dim=32, cross_attention_dim=128, caption_channels=128, sample_size=16)
of_diffusers("CogVideoXTransformer3DModel", "proj_out",
             {"hidden_states": lambda: noise(2, 2, 4, 16, 16), "timestep": time_step, **CAPTION},
             in_channels=4, out_channels=4, text_embed_dim=128, max_text_seq_length=8, sample_width=16,
             sample_height=16, sample_frames=5, time_embed_dim=64, **WIDE)
of_diffusers("PriorTransformer", "proj_to_clip_embeddings", {"hidden_states": lambda: noise(2, 160),
             "timestep": time_step, "proj_embedding": lambda: noise(2, 160),
             "encoder_hidden_states": lambda: noise(2, 8, 160)}, embedding_dim=160, num_embeddings=8,
             additional_embeddings=4, **WIDE)
of_diffusers("UNet2DConditionModel", "",
             {"sample": lambda: noise(2, 4, 16, 16), "timestep": time_step, **CAPTION}, sample_size=16,
             layers_per_block=1, block_out_channels=(64, 128),
             down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
             up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=128,
             attention_head_dim=4, use_linear_projection=True)
of_diffusers("AutoencoderKL", "", {"sample": lambda: noise(2, 3, 32, 32)}, block_out_channels=(32, 128),
             down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
of_diffusers("UVit2DModel", "", {"input_ids": lambda: words(2, 8, 8),
             "encoder_hidden_states": lambda: noise(2, 8, 128), "pooled_text_emb": lambda: noise(2, 64),
             "micro_conds": lambda: noise(2, 5)}, hidden_size=128, cond_embed_dim=64,
             micro_cond_encode_dim=16, micro_cond_embed_dim=80, encoder_hidden_size=128, vocab_size=WORDS,
             codebook_size=WORDS - 8, in_channels=128, block_out_channels=128, num_hidden_layers=2,
             num_attention_heads=4, sample_size=8, intermediate_size=256)

# -- x-transformers --


def of_x(title: str, heads: str, build: Callable[[Any], nn.Module], **inputs: Callable[[], Any]) -> None:
    def made() -> tuple[nn.Module, dict[str, Any]]:
        import x_transformers

        return build(x_transformers), {name: make() for name, make in (inputs or {"x": words}).items()}

    case(f"x-transformers {title}", heads, made)


def layers(x: Any, kind: str = "Decoder", **settings: Any) -> nn.Module:
    return getattr(x, kind)(**{"dim": 128, "depth": 2, "heads": 4, "attn_dim_head": 32, **settings})


def text(x: Any, kind: str = "Decoder", wrapper: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    return x.TransformerWrapper(
        num_tokens=WORDS, max_seq_len=32, attn_layers=layers(x, kind, **settings), **(wrapper or {})
    )


of_x("decoder", "to_logits", text)
of_x("decoder, tied", "token_emb.emb", lambda x: text(x, wrapper={"tie_embedding": True}))
of_x("encoder of text", "to_logits", lambda x: text(x, "Encoder"))
of_x("decoder, GLU, rotary, RMSNorm", "to_logits",
     lambda x: text(x, ff_glu=True, rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True))
of_x("decoder, sandwich norm", "to_logits", lambda x: text(x, sandwich_norm=True))
of_x("decoder, post-norm", "to_logits", lambda x: text(x, pre_norm=False))
of_x("decoder, residual gates", "to_logits", lambda x: text(x, gate_residual=True))
of_x("encoder alone", "", lambda x: layers(x, "Encoder"), x=lambda: noise(2, 16, 128))
of_x("ViT", "mlp_head", lambda x: x.ViTransformerWrapper(image_size=64, patch_size=16, num_classes=144,
     attn_layers=layers(x, "Encoder")), img=lambda: noise(2, 3, 64, 64))
of_x("ViT without classes", "", lambda x: x.ViTransformerWrapper(image_size=64, patch_size=16,
     attn_layers=layers(x, "Encoder")), img=lambda: noise(2, 3, 64, 64))
of_x("continuous", "project_out", lambda x: x.ContinuousTransformerWrapper(dim_in=144, dim_out=144,
     max_seq_len=32, attn_layers=layers(x)), x=lambda: noise(2, 16, 144))
of_x("encoder-decoder", "decoder.net.to_logits", lambda x: x.XTransformer(dim=128, enc_num_tokens=WORDS,
     enc_depth=2, enc_heads=4, enc_max_seq_len=32, dec_num_tokens=WORDS, dec_depth=2, dec_heads=4,
     dec_max_seq_len=32), src=words, tgt=words)
of_x("autoregressive, loss in the graph", "net.to_logits", lambda x: x.AutoregressiveWrapper(text(x)))

# -- the study --


def heads_of(model: nn.Module, arguments: dict[str, Any]) -> tuple[dict[str, str], int]:
    """The modules that are kept as output heads, with the way each was recognised, and the number of other
    modules with matmuls."""
    torch.compiler.reset()
    with mock.patch.object(classify, "HEADS", ()):
        report = fp8compile.explain(model, **arguments)
    if "incomplete" in report.summary():
        raise RuntimeError(report.summary())
    records = [record for record in report.matmuls if record.gemm == "fprop"]
    heads = {r.fqn: r.reason.partition(": ")[2] for r in records if r.reason.startswith("output head")}
    return heads, len({record.fqn for record in records} - heads.keys())


def study(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    begun = time.perf_counter()
    try:
        found, others = heads_of(*CASES[name].build())
    except Exception as error:
        return {"model": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {
        "model": name,
        "expected": sorted(CASES[name].heads),
        "found": dict(sorted(found.items())),
        "named": sorted(name for name in CASES[name].heads if name.rpartition(".")[2] in classify.HEADS),
        "others": others,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def verdict(line: dict[str, Any]) -> str:
    if "error" in line:
        return line["error"][:60]
    missing, extra = (
        set(line["expected"]) - line["found"].keys(),
        line["found"].keys() - set(line["expected"]),
    )
    wrong = [f"missing {', '.join(sorted(missing))}"] if missing else []
    return (
        "; ".join(wrong + ([f"too many: {', '.join(sorted(extra))}"] if extra else [])) or "as it should be"
    )


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["model"]: line for line in lines}


def tabled(lines: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    rows = []
    for name in (name for name in CASES if name in lines):
        line = lines[name]
        found = line.get("found", {})
        expected, named = line.get("expected", ()), line.get("named", ())
        recognised = ", ".join(dict.fromkeys(found.values()))
        rows.append(
            [
                name,
                ", ".join(expected) or "none",
                ", ".join(named),
                line.get("others", ""),
                recognised,
                verdict(line),
            ]
        )
    good = sum(row[-1] == "as it should be" for row in rows)
    head = ["model", "its heads", "in the list of names", "other layers", "recognised", "verdict"]
    return f"{table(rows, head, markdown=True)}\n\n{good} of {len(rows)} as they should be"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=PATH, help="one line of JSON a model")
    given = parser.parse_args(argv)
    names = [name for name in CASES if given.only.lower() in name.lower() and not given.show]
    progress = Progress(len(names), "heads")
    lines = read(given.out)
    about = {"date": machine.now(), **machine.commit(), "versions": machine.versions()}
    for name in names:
        progress(name, 0)
        lines[name] = {**study(name), **about}
        given.out.write_text("".join(json.dumps(lines[name]) + "\n" for name in CASES if name in lines))
        progress(name)
    progress.close()
    print(tabled({name: line for name, line in lines.items() if given.only.lower() in name.lower()}))


if __name__ == "__main__":
    main()
