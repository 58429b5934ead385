//! The plan that settings describe, the fastest one within a budget, and the next one where memory ran out.

use super::fit::Fit;
use super::{advice, search};
use crate::estimate::EstimatePhase;
use crate::request::{Candidate, Request};
use crate::{Error, Plan, Result};
use firebrick_spec::Category;
use std::collections::BTreeMap;

/// The failure of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failure {
    /// The phase that ran out of memory, as the estimate has it; any where absent.
    pub phase: Option<EstimatePhase>,
    /// Bytes that were in use, where they could be counted.
    pub used: Option<u64>,
    /// Bytes that there are.
    pub limit: Option<u64>,
}

/// Share of the failed plan's predicted bytes that the next one has to save at least: of those that plans decide about.
const MIN_SAVING: f64 = 0.1;

impl Request {
    /// The plan that the settings spell out, with its estimate, whether it fits or not.
    ///
    /// # Errors
    /// `Error::Config` for settings that give no plan, and `Error::Plan` also for tensors that the device cannot hold
    /// in one piece.
    pub fn as_configured(&self) -> Result<Fit> {
        self.fit_candidate(Candidate { memory: self.memory.clone(), max_num_seqs: self.max_num_seqs })
    }

    /// The plan with the least estimated time that fits.
    ///
    /// # Errors
    /// `Error::Infeasible` if no plan fits, with what would help; `Error::Config` for settings that give no plan,
    /// and `Error::Plan` also for tensors that the device cannot hold in one piece.
    pub fn fit(&self) -> Result<Fit> {
        match search::below(&self.within_buffers(), &self.limits(), f64::INFINITY)? {
            Some((_, best)) => self.fit_candidate(best),
            None => Err(Error::Infeasible(Box::new(advice::explain(self)?))),
        }
    }

    /// The fastest plan that should get by where `current` ran out of memory: its prediction stays below the current
    /// one's by a tenth of all but the runtime's overhead, and below the limit by as much as the failed prediction was
    /// too low.
    ///
    /// # Errors
    /// `Error::Infeasible` if no plan is predicted to need that little, with what would help; the others as in
    /// [`Self::fit`].
    pub fn next_cheaper(&self, current: &Plan, failure: &Failure) -> Result<Fit> {
        let (phase, bound) = self.bound(current, failure);
        let mut limits = self.limits();
        match phase {
            Some(phase) => limit(&mut limits.phases, phase, bound),
            None => limits.device = limits.device.min(bound),
        }
        match search::below(&self.within_buffers(), &limits, f64::INFINITY)? {
            Some((_, best)) => self.fit_candidate(best),
            None => {
                let mut tighter = self.clone();
                tighter.budget = Some((bound as f64 / (1.0 - self.memory.margin)) as u64);
                Err(Error::Infeasible(Box::new(advice::explain(&tighter)?)))
            }
        }
    }

    /// Keeps the limit of a phase in which memory ran out, so that a later plan, chosen because of another phase, keeps
    /// it too.
    pub fn learn(&mut self, current: &Plan, failure: &Failure) {
        if let (Some(phase), bound) = self.bound(current, failure) {
            limit(&mut self.phase_limits, phase, bound);
        }
    }

    /// The bytes that the phase that failed may take in the next plan; of all phases where none is named.
    fn bound(&self, current: &Plan, failure: &Failure) -> (Option<EstimatePhase>, u64) {
        let failed = self.estimate(current);
        let phase = failure.phase.and_then(|name| failed.phase(name));
        let predicted = phase.map_or(failed.peak_bytes, |p| p.total_bytes);
        let of_no_plan = phase
            .or_else(|| failed.peak_phase())
            .and_then(|p| p.categories.get(&Category::Overhead).copied())
            .unwrap_or(0);
        let decided = predicted.saturating_sub(of_no_plan);
        let below = predicted - (decided as f64 * MIN_SAVING) as u64;
        let bound = match (failure.used, failure.limit) {
            (Some(used), Some(limit)) if used > 0 => below.min((limit as f64 * predicted as f64 / used as f64) as u64),
            (_, Some(limit)) => below.min(limit),
            _ => below,
        };
        (phase.map(|phase| phase.name), bound)
    }
}

/// Lowers the limit of a phase.
fn limit(phases: &mut BTreeMap<EstimatePhase, u64>, phase: EstimatePhase, bytes: u64) {
    let limit = phases.entry(phase).or_insert(bytes);
    *limit = bytes.min(*limit);
}
