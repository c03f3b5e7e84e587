"""A rank's part of the model: process groups, megatron-core's configuration, model chunks and initial weights."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.engines.common.kernels import adds_output_gradient, fuses_blocks, fuses_cross_entropy
from megabench.engines.megatron.blocks import llama_blocks
from megabench.engines.megatron.ends import ParallelEmbedding, ParallelLossHead
from megabench.engines.megatron.linear import exchange_of
from megabench.models.mapping import padded_vocab_size, shard
from megabench.models.rotary import rotary_frequencies
from megabench.models.weights import Weights, read_shard
from megabench.parallel.layout import Layout
from megabench.runtime.device import DTYPES
from megabench.specs.megatron import chunk_layers, tp_overlap


def create_process_groups(layout: Layout, optimizer_copies: int = 1) -> ProcessGroupCollection:
    """Create megatron-core's process groups of a layout. The ranks of the default process group must be placed already.

    `optimizer_copies` is the number of copies of the optimizer state. Each copy is sharded over neighbouring replicas.

    The groups are part of megatron-core's global state. A second call returns the same groups.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
            context_parallel_size=layout.cp,
            num_distributed_optimizer_instances=optimizer_copies,
            create_gloo_process_groups=False,
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    sizes = (groups.tp.size(), groups.cp.size(), groups.pp.size(), groups.dp.size())
    assert sizes == (layout.tp, layout.cp, layout.pp, layout.dp), "one process, one layout"
    return groups


class ParallelLlama(GPTModel):
    """GPTModel with Llama blocks for one pipeline chunk, or for a part of a chunk.

    `layers` are the numbers of the chunk's layers in the whole model, and `chunk` is the chunk's number on its stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        run: ResolvedConfig,
        groups: ProcessGroupCollection,
        layers: range,
        has_embedding: bool,
        has_output: bool,
        chunk: int = 0,
    ) -> None:
        layout, shape = run.layout, run.shape
        self.layers = layers
        super().__init__(
            config=config,
            transformer_layer_spec=llama_blocks(layers, run),
            vocab_size=padded_vocab_size(shape, layout.tp),
            max_sequence_length=run.seq_length,
            pre_process=has_embedding,
            post_process=has_output,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=chunk if layout.vp > 1 else None,
        )
        self.rotary_pos_emb.inv_freq = rotary_frequencies(shape).to(self.rotary_pos_emb.inv_freq.device)
        exchange = exchange_of(groups.tp if layout.tp > 1 else None, tp_overlap(run))
        if has_embedding:
            embedding = self.embedding.word_embeddings
            embedding.__class__ = ParallelEmbedding
            embedding.exchange, embedding.padding_token = exchange, shape.pad_token_id
        held = shape.vocab_size - self.vocab_size // layout.tp * groups.tp.rank()
        self.num_real_rows = max(0, min(held, self.vocab_size // layout.tp))
        if self.post_process and fuses_cross_entropy(run):
            self.output_layer.__class__ = ParallelLossHead  # tied weights share one name
            self.output_layer.exchange = exchange
            if adds_output_gradient(run):
                self.output_layer.loss_factor = loss_factor(run, groups)

    def forward(self, *args: Any, labels: Tensor | None, **kwargs: Any) -> Tensor:
        """Compute losses, or the output for the next stage, from tokens [B, S] or the output of the previous stage.

        Without labels, the last stage returns logits, [B, S, V/tp].
        """
        if labels is not None and isinstance(head := getattr(self, "output_layer", None), ParallelLossHead):
            head.labels, head.num_real_rows = labels, self.num_real_rows
        output: Tensor = super().forward(*args, labels=labels, **kwargs)
        return output

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross-entropy of every token, fp32 [B, S], from labels [B, S] and logits [S, B, V/tp].

        Padded vocabulary rows get no probability, because they would otherwise change the softmax and the loss. After a
        ParallelLossHead, `logits` is already the mean loss.
        """
        if isinstance(self.output_layer, ParallelLossHead):
            return logits
        if self.num_real_rows < logits.shape[-1]:
            logits[..., self.num_real_rows :] = -torch.inf
        return vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous()).transpose(0, 1)


def loss_factor(run: ResolvedConfig, groups: ProcessGroupCollection) -> float:
    """Return the factor by which the mean loss of a micro-batch is multiplied before the backward pass.

    All micro-batches, replicas and context-parallel parts have equal numbers of tokens, so all means have equal weight.
    In fp16, gradients are divided by the number of replicas later, as in all engines, because small gradients would
    underflow.
    """
    replicas: int = 1 if run.policy.scales_loss else groups.dp_cp.size()
    return 1 / (run.num_micro_batches * replicas)


def transformer_config(run: ResolvedConfig) -> TransformerConfig:
    """Return megatron-core's configuration for the model, the layout and the schedule of `run`."""
    shape, layout = run.shape, run.layout
    dtype = DTYPES[run.precision]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            num_query_groups=shape.num_kv_heads,
            kv_channels=shape.head_dim,
            ffn_hidden_size=shape.ffn_size,
            normalization="RMSNorm",
            layernorm_epsilon=shape.norm_eps,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=shape.table.qkv_bias,
            qk_layernorm=shape.table.qk_norm,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_activation_fusion=False,
            use_te_activation_func=fuses_blocks(run),  # the kernel is in swiglu.py, not in Transformer Engine
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,  # this flag selects apex's kernel; linear.py has its own.
            # Initialization marks parameters as tensor-parallel, which the gradient norm needs. Their values are loaded
            # by load_weights.
            perform_initialization=True,
            init_method=_leave,
            output_layer_init_method=_leave,
            bf16=run.policy.compute == "bf16",
            fp16=run.policy.compute == "fp16",
            params_dtype=dtype,
            tensor_model_parallel_size=layout.tp,
            sequence_parallel=layout.tp > 1,
            context_parallel_size=layout.cp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
            pipeline_model_parallel_layout=_pipeline_layout(run),
            pipeline_dtype=dtype,
            # With batched p2p and pp=2, the interleaved schedule silently computes wrong gradients.
            overlap_p2p_comm=layout.vp > 1,
            batch_p2p_comm=layout.vp == 1,
            # without this, the host waits for the device at every message, a workaround for a bug that torch 1.13 fixed
            batch_p2p_sync=False,
            # with overlapped p2p, the schedule would free an output that is still being sent
            deallocate_pipeline_outputs=layout.vp == 1,
            # the engine's _loss divides by the number of tokens; megatron-core's averaging would multiply by cp
            calculate_per_token_loss=True,
            cross_entropy_loss_fusion=False,
            recompute_granularity=None if run.recompute == "none" else run.recompute,
            recompute_method="uniform" if run.recompute == "full" else None,
            recompute_num_layers=1 if run.recompute == "full" else None,
            recompute_modules=["core_attn"],
        )


def _leave(weight: Tensor) -> Tensor:
    """An initialization that does not change the weight."""
    return weight


def _pipeline_layout(run: ResolvedConfig) -> list[list[str]] | None:
    """Return the contents of each pipeline chunk in model order.

    The number of layers need not be divisible by the stages.
    """
    layout, stages = run.layout, chunk_layers(run)
    if layout.pp == 1:
        return None
    rows = [["decoder"] * len(stages[stage][chunk]) for chunk in range(layout.vp) for stage in range(layout.pp)]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return rows


def whole_model_name(chunk: ParallelLlama, name: str) -> str:
    """Return a parameter's name with its layer numbered through the whole model instead of this chunk."""
    head, separator, rest = name.partition("decoder.layers.")
    if not separator:
        return name
    local, _, tail = rest.partition(".")
    return f"{head}decoder.layers.{chunk.layers[int(local)]}.{tail}"


@torch.no_grad()
def load_weights(chunk: ParallelLlama, weights: Weights, run: ResolvedConfig, tp_rank: int) -> None:
    """Load this rank's part of `weights` into a chunk, in the training dtype."""
    for name, parameter in chunk.named_parameters():
        cut = shard(whole_model_name(chunk, name), run.shape, run.layout.tp, tp_rank)
        values = read_shard(weights, cut)
        assert values.shape == parameter.shape, f"{name}: {tuple(values.shape)} for {tuple(parameter.shape)}"
        # cast on the GPU, because torchrun gives each process only one CPU thread
        parameter.copy_(values.to(parameter.device))
