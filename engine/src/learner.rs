//! What learns: the policy, its optimizer, and the plan under which one updates the other.

use crate::Result;
use crate::batch::{Cut, DropoutStep, Sequence, pack};
use crate::gradients::Gradients;
use crate::objective::TokenLoss;
use crate::optim::{AdamW, OptimConfig, StepOutcome};
use crate::placed::Placed;
use crate::plan::{ModelPlan, OptimizerPlan, Role};
use crate::runtime::Runtime;
use crate::schedule::{LossSums, MicroScores, Schedule, score_all};
use firebrick_models::Decoder;

/// The policy and everything that changes it.
#[derive(Debug)]
pub struct Learner {
    /// The policy, in its place.
    pub policy: Placed,
    /// Its optimizer.
    pub optimizer: AdamW,
    /// Copier, accounts, limit.
    pub runtime: Runtime,
    /// What the next update's dropout follows from.
    pub dropout: DropoutStep,
}

/// What one optimizer step did.
#[derive(Clone, Debug)]
pub struct Updated {
    /// The loss and the objective's metrics.
    pub sums: LossSums,
    /// Norm of the gradient, and whether it was applied.
    pub outcome: StepOutcome,
    /// Micro-batches.
    pub micro_batches: usize,
}

/// Gradients of a whole optimizer step, before they are applied.
#[derive(Debug)]
pub struct Accumulated {
    gradients: Gradients,
    sums: LossSums,
    /// Where the plan updated in the backward pass.
    applied: Option<StepOutcome>,
    micro_batches: usize,
}

impl Learner {
    /// A learner without history.
    #[must_use]
    pub fn new(decoder: Decoder, plan: ModelPlan, optim: OptimConfig, runtime: Runtime) -> Self {
        let accounts = &runtime.accounts;
        let optimizer = AdamW::planned(optim, &decoder, plan.optimizer, accounts);
        Self {
            policy: Placed::new(decoder, plan, Role::Policy, accounts),
            optimizer,
            runtime,
            dropout: DropoutStep::default(),
        }
    }

    /// The policy.
    #[must_use]
    pub fn decoder(&self) -> &Decoder {
        &self.policy.decoder
    }

    /// A fresh optimizer for the same policy, under the same plan.
    #[must_use]
    pub fn fresh_optimizer(&self, optim: OptimConfig) -> AdamW {
        let (decoder, plan) = (&self.policy.decoder, self.policy.plan.optimizer);
        AdamW::planned(optim, decoder, plan, &self.runtime.accounts)
    }

    /// Log-probs and entropies of sequences, in their order.
    pub fn score(&self, sequences: &[Sequence], temperature: f64) -> Result<MicroScores> {
        score_placed(&self.policy, &self.runtime, sequences, temperature)
    }

    /// Replaces where the optimizer works; what it has learnt stays.
    pub fn replan_optimizer(&mut self, plan: OptimizerPlan) -> Result<()> {
        let decoder = &self.policy.decoder;
        self.optimizer.replan(plan, decoder)
    }

    /// The same under the policy with its adapters off: the reference policy of a run that trains adapters.
    pub fn score_base(&self, sequences: &[Sequence], temperature: f64) -> Result<MicroScores> {
        let plan = &self.policy.plan;
        let schedule = Schedule::new(plan, &self.runtime, temperature);
        let base = self.policy.decoder.adapters_off();
        score_all(&schedule, &base, sequences, score_cut(plan))
    }

    /// One optimizer step over sequences whose weights already hold the step's normalisers.
    pub fn update(
        &mut self,
        sequences: &[Sequence],
        temperature: f64,
        loss: &dyn TokenLoss,
        lr: f64,
    ) -> Result<Updated> {
        let accumulated = self.accumulate(sequences, temperature, loss, lr)?;
        self.apply(accumulated, lr)
    }

    /// The first half of an optimizer step: forward and backward over all micro-batches. Unless the plan updates in the
    /// backward pass, it changes nothing and may be run again after an error.
    pub fn accumulate(
        &mut self,
        sequences: &[Sequence],
        temperature: f64,
        loss: &dyn TokenLoss,
        lr: f64,
    ) -> Result<Accumulated> {
        let Self {
            policy,
            optimizer,
            runtime,
            dropout,
        } = self;
        let Placed { decoder, plan, .. } = policy;
        let schedule = Schedule::new(plan, runtime, temperature).with_dropout(*dropout);
        let mut gradients = Gradients::planned(decoder.specs().count(), plan, runtime);
        let micros: Vec<Vec<&Sequence>> = pack(sequences, train_cut(plan))?
            .iter()
            .map(|m| m.iter().map(|&i| &sequences[i]).collect())
            .collect();
        let mut applied = None;
        let sums = if plan.optimizer.in_backward {
            let mut step = optimizer.in_backward(lr);
            let sums =
                schedule.backward(decoder, &micros, loss, &mut gradients, Some(&mut step))?;
            applied = Some(StepOutcome {
                grad_norm: step.grad_norm(),
                applied: true,
            });
            sums
        } else {
            schedule.backward(decoder, &micros, loss, &mut gradients, None)?
        };
        Ok(Accumulated {
            gradients,
            sums,
            applied,
            micro_batches: micros.len(),
        })
    }

    /// The second half: clips and updates.
    pub fn apply(&mut self, accumulated: Accumulated, lr: f64) -> Result<Updated> {
        let Accumulated {
            gradients,
            sums,
            applied,
            micro_batches,
        } = accumulated;
        let outcome = match applied {
            Some(outcome) => outcome,
            None => {
                let decoder = &mut self.policy.decoder;
                self.optimizer.step(decoder, gradients, lr, &self.runtime)?
            }
        };
        Ok(Updated {
            sums,
            outcome,
            micro_batches,
        })
    }
}

/// Log-probs and entropies of sequences under any placed model, in their order.
pub fn score_placed(
    model: &Placed,
    runtime: &Runtime,
    sequences: &[Sequence],
    temperature: f64,
) -> Result<MicroScores> {
    let schedule = Schedule::new(&model.plan, runtime, temperature).for_role(model.role());
    score_all(&schedule, &model.decoder, sequences, score_cut(&model.plan))
}

/// How a plan cuts training batches.
#[must_use]
pub fn train_cut(plan: &ModelPlan) -> Cut {
    Cut {
        max_tokens: plan.train_tokens,
        max_sequences: plan.micro_batch_size,
        key: "memory.train_tokens",
    }
}

/// How a plan cuts forward-only batches.
#[must_use]
pub fn score_cut(plan: &ModelPlan) -> Cut {
    Cut {
        max_tokens: plan.score_tokens,
        max_sequences: plan.micro_batch_size,
        key: "memory.score_tokens",
    }
}
