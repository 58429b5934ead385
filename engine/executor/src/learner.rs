//! A trained model, policy or critic: the model, its optimizer, and the plan under which one updates the other.

use crate::batch::{Batch, BatchStats, DropoutStep, MicroBatchLimits, grouping, scoring_layout, training_layout};
use crate::optim::{AdamW, OptimConfig, StepOutcome};
use crate::segment_executor::values_all;
use crate::{Executor, Gradients, HeadLoss, ResidentModel, Runtime, rounds, score_all};
use firebrick_backends::device::is_cpu;
use firebrick_backends::trace::span_on;
use firebrick_core::sequence::Sequence;
use firebrick_core::{Error, Result};
use firebrick_models::Decoder;
use firebrick_models::arch::Mixer;
use firebrick_objectives::{LossSums, MicroScores};
use firebrick_plan::estimate::Sizes;
use firebrick_plan::{Layout, ModelPlan, Role, Zero};
use std::sync::Arc;

/// A model that is trained and everything that changes it.
#[derive(Debug)]
pub struct Learner {
    /// The model, in its place.
    pub model: ResidentModel,
    /// Its optimizer.
    pub optimizer: AdamW,
    /// Copier, accounts, limit; all learners of a run share them.
    pub runtime: Arc<Runtime>,
    /// Key of the next update's dropout.
    pub dropout: DropoutStep,
    /// Coefficient of the routers' auxiliary loss; 0 is none.
    pub router_aux_loss_coef: f64,
}

/// Statistics of an optimizer step.
#[derive(Clone, Debug)]
pub struct Updated {
    /// The loss and the objective's metrics.
    pub sums: LossSums,
    /// Norm of the gradient, and whether it was applied.
    pub outcome: StepOutcome,
    /// Micro-batches of its sequences.
    pub batch: BatchStats,
}

/// Gradients of a whole optimizer step, before they are applied.
#[derive(Debug)]
pub struct Accumulated {
    gradients: Gradients,
    sums: LossSums,
    /// Outcome of updates in the backward pass, if the plan has them.
    applied: Option<StepOutcome>,
    batch: BatchStats,
}

impl Learner {
    /// A policy's learner without history.
    pub fn new(decoder: Decoder, plan: ModelPlan, optim: OptimConfig, runtime: impl Into<Arc<Runtime>>) -> Self {
        Self::for_role(Role::Policy, decoder, plan, optim, runtime)
    }

    /// A learner without history of a model in any role that is trained.
    pub fn for_role(
        role: Role,
        decoder: Decoder,
        plan: ModelPlan,
        optim: OptimConfig,
        runtime: impl Into<Arc<Runtime>>,
    ) -> Self {
        let runtime = runtime.into();
        let accounts = runtime.accounts.for_model(role);
        let partition = runtime.world().replicas().partition(plan.zero);
        let optimizer = AdamW::sharded(optim, &decoder, plan.optimizer, &accounts, partition);
        Self {
            model: ResidentModel::new(decoder, plan, role, &accounts).shared_by(runtime.world()),
            optimizer,
            runtime,
            dropout: DropoutStep::default(),
            router_aux_loss_coef: 0.0,
        }
    }

    /// Sets the learning-rate factor of a joint value head.
    #[must_use]
    pub fn with_value_rate(mut self, rate: f64) -> Self {
        self.optimizer.set_value_rate(rate);
        self
    }

    /// The model.
    pub fn decoder(&self) -> &Decoder {
        &self.model.decoder
    }

    /// Model and optimizer with the same values, for another thread to read until these are updated. `None` on a GPU,
    /// whose tensors stay on their thread, and if ranks share the model or some of the state is on the host.
    pub fn shared(&self) -> Option<(ResidentModel, AdamW)> {
        let model = &self.model;
        let is_alone = !model.is_shared_out() && model.decoder.share().is_none();
        let optimizer = self.optimizer.shared().filter(|_| is_alone && is_cpu(model.decoder.device()))?;
        Some((model.shared(), optimizer))
    }

    /// Waits until weights and optimizer state are where they were loaded to.
    ///
    /// # Errors
    /// If some are not, since memory ran out or the device failed.
    pub fn check_computed(&self) -> Result<()> {
        self.model.decoder.check_computed()?;
        self.optimizer.check_computed()
    }

    /// A fresh optimizer for the same model, under the same plan.
    pub fn fresh_optimizer(&self, optim: OptimConfig) -> AdamW {
        let ResidentModel { decoder, plan, .. } = &self.model;
        let accounts = self.runtime.accounts.for_model(self.model.role());
        let partition = self.runtime.world().replicas().partition(plan.zero);
        AdamW::sharded(optim, decoder, plan.optimizer, &accounts, partition)
    }

    /// Log-probs and entropies, in nats, of the scored tokens of sequences, in their order. Logits are divided by
    /// `temperature`, which is above 0.
    ///
    /// # Errors
    ///
    /// If a sequence is longer than the plan's `score_tokens`, memory runs out, or the device fails.
    pub fn score(&self, sequences: &[Sequence], temperature: f64) -> Result<MicroScores> {
        score_placed(&self.model, &self.runtime, sequences, temperature)
    }

    /// A critic's values of sequences' scored tokens, in their order.
    ///
    /// # Errors
    ///
    /// Those of [`score`](Self::score).
    pub fn values(&self, sequences: &[Sequence]) -> Result<Vec<Vec<f32>>> {
        values_placed(&self.model, &self.runtime, sequences)
    }

    /// Takes another plan; what the optimizer has learnt stays. Weights move at the next
    /// [`ResidentModel::set_residency`].
    ///
    /// # Errors
    /// `Error::Model` and `Error::Device` where moments cannot be copied to their new place: the model keeps its plan,
    /// and another can be taken.
    pub fn replan(&mut self, plan: &ModelPlan) -> Result<()> {
        let model = &mut self.model;
        if plan.optimizer != model.plan.optimizer {
            self.optimizer.replan(plan.optimizer, &model.decoder)?;
        }
        model.take_plan(plan);
        Ok(())
    }

    /// Scores with the adapters off: the reference policy of a run that trains adapters.
    ///
    /// # Errors
    /// As [`score_placed`].
    pub fn score_base(&self, sequences: &[Sequence], temperature: f64) -> Result<MicroScores> {
        let plan = &self.model.plan;
        let executor = Executor::new(plan, &self.runtime, temperature);
        let base = self.model.decoder.adapters_off();
        let cut = score_cut(plan, &base);
        score_all(&executor, &base, sequences, cut)
    }

    /// One optimizer step: forward and backward over all micro-batches, gradient clipping, one `AdamW` step at the
    /// learning rate `lr`. The loss is a weighted sum over scored tokens: every sequence has its tokens' weights in
    /// [`columns.weight`](firebrick_core::sequence::TokenColumns::weight), with the step's normalisers in them, so that
    /// the result does not depend on how the batch is divided. Logits are divided by `temperature`; a critic has none.
    ///
    /// # Errors
    ///
    /// If a sequence is longer than the plan's `train_tokens`, memory runs out, or the device fails.
    ///
    /// # Panics
    ///
    /// If scored tokens lack a weight.
    pub fn update<'l>(
        &mut self,
        sequences: &[Sequence],
        temperature: f64,
        loss: impl Into<HeadLoss<'l>>,
        lr: f64,
    ) -> Result<Updated> {
        let accumulated = self.accumulate(sequences, temperature, loss, lr)?;
        self.apply(accumulated, lr)
    }

    /// The first half of an optimizer step: forward and backward over all micro-batches. Unless the plan updates in the
    /// backward pass, it changes no weight and may be run again after an error. What the second half adds to the memory
    /// in use is allocated here: the moments of a first update, buffers for weights that were shared, what the norm of
    /// the gradient takes.
    ///
    /// # Errors
    ///
    /// Those of [`update`](Self::update), and a plan that updates in the backward pass on more than one rank.
    pub fn accumulate<'l>(
        &mut self,
        sequences: &[Sequence],
        temperature: f64,
        loss: impl Into<HeadLoss<'l>>,
        lr: f64,
    ) -> Result<Accumulated> {
        let Self { model, optimizer, runtime, dropout, router_aux_loss_coef } = self;
        let role = model.role();
        let ResidentModel { decoder, plan, .. } = model;
        check_ranks(plan, runtime)?;
        optimizer.reserve(decoder)?;
        let world = runtime.world();
        let cut = train_cut(plan, decoder);
        let batch = Batch::pack_for(sequences, cut, world.data_size())?;
        let all_micros = batch.micros();
        let tokens = sequences.iter().map(|s| s.tokens.len()).sum();
        let mut dealt = batch.deal(world.data_size());
        let executor = Executor::new(plan, runtime, temperature)
            .for_role(role)
            .with_rounds(rounds(plan, &dealt, Zero::Stage2))
            .with_dropout(*dropout)
            .with_router_loss(*router_aux_loss_coef, tokens)
            .with_loss_scale(optimizer.loss_scale());
        let mut gradients =
            Gradients::planned(decoder.specs().count(), plan, runtime).for_decoder(decoder).for_role(role);
        // of one rank all, in their order
        let assigned = dealt.swap_remove(world.data_rank());
        let micros: Vec<_> = assigned.into_iter().map(|i| all_micros[i].clone()).collect();
        let mut applied = None;
        let sums = if plan.optimizer.in_backward {
            let mut step = optimizer.in_backward(lr);
            let sums = executor.backward(decoder, &micros, loss, &mut gradients, Some(&mut step))?;
            applied = Some(StepOutcome::applied(step.grad_norm()));
            sums
        } else {
            let sums = executor.backward(decoder, &micros, loss, &mut gradients, None)?;
            // those of one pipeline have the sums on their last stage
            let sums = match world.pipeline_stage() {
                Some(_) => sums.gather(world)?,
                None => sums.gather(&world.replicas())?,
            };
            gradients.reduce(decoder, runtime)?;
            gradients.global_norm(world)?;
            sums
        };
        Ok(Accumulated {
            gradients,
            sums,
            applied,
            batch: batch.stats(grouping(plan.attention_rows, decoder.device())),
        })
    }

    /// The second half: clips and updates. A loss or a gradient norm that is not finite updates nothing.
    ///
    /// # Errors
    /// As [`AdamW::step`].
    pub fn apply(&mut self, accumulated: Accumulated, lr: f64) -> Result<Updated> {
        let _span = span_on("optimizer", self.model.decoder.device());
        let Accumulated { gradients, sums, applied, batch } = accumulated;
        let outcome = match applied {
            Some(outcome) => outcome,
            None if !sums.loss.is_finite() => self.optimizer.skipped(&gradients),
            None => {
                let decoder = &mut self.model.decoder;
                self.optimizer.step(decoder, gradients, lr, &self.runtime)?
            }
        };
        Ok(Updated { sums, outcome, batch })
    }
}

/// Refuses a plan whose update needs the gradients of all ranks before they are there.
fn check_ranks(plan: &ModelPlan, runtime: &Runtime) -> Result<()> {
    if plan.optimizer.in_backward && !runtime.world().is_solo() {
        return Err(Error::Config(format!(
            "memory.step_in_backward updates a unit before other ranks have its gradient, and this run has {} ranks; set it to false",
            runtime.world().size()
        )));
    }
    Ok(())
}

/// Log-probs and entropies of sequences under any placed model, in their order.
///
/// # Errors
/// As [`score_all`].
pub fn score_placed(
    model: &ResidentModel,
    runtime: &Runtime,
    sequences: &[Sequence],
    temperature: f64,
) -> Result<MicroScores> {
    let executor = Executor::new(&model.plan, runtime, temperature).for_role(model.role());
    let cut = score_cut(&model.plan, &model.decoder);
    score_all(&executor, &model.decoder, sequences, cut)
}

/// Values of sequences' scored tokens under any placed critic or reward model, in their order.
///
/// # Errors
/// As [`score_all`].
pub fn values_placed(model: &ResidentModel, runtime: &Runtime, sequences: &[Sequence]) -> Result<Vec<Vec<f32>>> {
    let executor = Executor::new(&model.plan, runtime, 1.0).for_role(model.role());
    values_all(&executor, &model.decoder, sequences, score_cut(&model.plan, &model.decoder))
}

/// Limits of training micro-batches.
pub fn train_cut(plan: &ModelPlan, decoder: &Decoder) -> MicroBatchLimits {
    let layout = training_layout(plan.layout, decoder);
    cut(plan, decoder, plan.train_tokens, layout, "memory.train_tokens")
}

/// Limits of forward-only micro-batches.
pub fn score_cut(plan: &ModelPlan, decoder: &Decoder) -> MicroBatchLimits {
    let layout = scoring_layout(plan.layout, decoder);
    cut(plan, decoder, plan.score_tokens, layout, "memory.score_tokens")
}

fn cut(plan: &ModelPlan, decoder: &Decoder, max_tokens: usize, layout: Layout, key: &'static str) -> MicroBatchLimits {
    let arch = decoder.whole_arch();
    let sizes = Sizes::new(arch, None);
    // 4 · width · keys operations of attention against 2 for every weight
    let attention = 2 * arch.count(Mixer::Attention) * arch.num_heads * arch.head_dim;
    MicroBatchLimits {
        max_tokens,
        max_sequences: plan.micro_batch_size,
        layout,
        key_cost: attention as f64 / (sizes.active_body() + sizes.projection) as f64,
        key,
    }
}
