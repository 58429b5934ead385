//! Routes: which experts tokens went through. They are recorded while tokens are sampled, and may be used again where
//! the same tokens are scored and trained on (router replay: Ma et al., 2025, arXiv:2510.11370), so that log-probs
//! compare the same network.

use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, PoisonError};

/// The experts of rows of tokens, `[rows, width]`: those of the first layer with experts, the likeliest first, then
/// those of the next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Routes {
    width: usize,
    choices: Vec<u16>,
}

impl Routes {
    /// A choice that nobody has recorded.
    pub const UNKNOWN: u16 = u16::MAX;

    /// Rows of which nothing is known. The width is the architecture's
    /// [`route_width`](crate::Arch::route_width).
    pub fn unknown(rows: usize, width: usize) -> Self {
        Self { width, choices: vec![Self::UNKNOWN; rows * width] }
    }

    /// Rows of one width.
    ///
    /// # Panics
    /// If they have several.
    pub fn from_rows(rows: &[&[u16]]) -> Self {
        let width = rows.first().map_or(0, |row| row.len());
        assert!(rows.iter().all(|row| row.len() == width), "rows of one width");
        Self { width, choices: rows.concat() }
    }

    /// The choices of all rows, one behind the other.
    pub fn choices(&self) -> &[u16] {
        &self.choices
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.choices.len().checked_div(self.width).unwrap_or(0)
    }

    /// Choices of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The choices of a row.
    pub fn row(&self, index: usize) -> &[u16] {
        &self.choices[index * self.width..][..self.width]
    }

    /// Replaces rows from `first` on by those of another; rows that this does not have are left out.
    pub fn set(&mut self, first: usize, rows: &Self) {
        let room = self.choices.len().saturating_sub(first * self.width);
        let count = rows.choices.len().min(room);
        self.choices[first * self.width..][..count].copy_from_slice(&rows.choices[..count]);
    }

    /// Adds rows of the same width behind these.
    pub fn append(&mut self, mut rows: Self) {
        self.choices.append(&mut rows.choices);
    }

    /// Some rows.
    #[must_use]
    pub fn slice(&self, rows: std::ops::Range<usize>) -> Self {
        let choices = self.choices[rows.start * self.width..rows.end * self.width].to_vec();
        Self { width: self.width, choices }
    }

    /// Makes room for `rows` rows.
    pub(crate) fn resize(&mut self, rows: usize) {
        self.choices.resize(rows * self.width, Self::UNKNOWN);
    }

    pub(crate) fn set_row(&mut self, index: usize, row: &[u16]) {
        self.choices[index * self.width..][..self.width].copy_from_slice(row);
    }

    /// Copies blocks of `rows` rows over others: `pairs` are source and target.
    pub(crate) fn copy_blocks(&mut self, pairs: &[(u32, u32)], rows: usize) {
        let size = rows * self.width;
        for &(source, target) in pairs {
            let [from, to] = [source, target].map(|block| block as usize * size);
            self.choices.copy_within(from..from + size, to);
        }
    }
}

/// Replay and recording of routes in a forward pass: neither by default.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    replayed: Option<Arc<Routes>>,
    recorded: Option<Arc<Mutex<Routes>>>,
}

impl Routing {
    /// Replays known routes; routers choose for the other rows.
    #[must_use]
    pub fn replayed(mut self, routes: Routes) -> Self {
        self.replayed = Some(Arc::new(routes));
        self
    }

    /// Records the routes of `rows` rows, for [`Self::take_recorded`].
    #[must_use]
    pub fn recorded(mut self, rows: usize, width: usize) -> Self {
        self.recorded = Some(Arc::new(Mutex::new(Routes::unknown(rows, width))));
        self
    }

    /// The routes that were recorded.
    pub fn take_recorded(&self) -> Option<Routes> {
        let recorded = self.recorded.as_ref()?;
        let mut routes = recorded.lock().unwrap_or_else(PoisonError::into_inner);
        Some(std::mem::take(&mut *routes))
    }

    /// The choices of all rows in the layer whose choices begin at `offset`, `route` chooses for rows of which nothing
    /// is known.
    pub(crate) fn choose(&self, [offset, per_token]: [usize; 2], route: impl FnOnce() -> Vec<u32>) -> Vec<u32> {
        let chosen = match &self.replayed {
            None => route(),
            Some(routes) => replay(routes, [offset, per_token], route),
        };
        if let Some(recorded) = &self.recorded {
            let mut routes = recorded.lock().unwrap_or_else(PoisonError::into_inner);
            for (row, experts) in chosen.chunks(per_token).enumerate() {
                let start = row * routes.width + offset;
                for (place, &expert) in routes.choices[start..].iter_mut().zip(experts) {
                    *place = expert as u16;
                }
            }
        }
        chosen
    }
}

/// The auxiliary loss that balances the load of experts (Fedus et al., 2021, arXiv:2101.03961): for a layer with E
/// experts, `E · Σ fₑ · Pₑ`, where fₑ are the choices of expert e over the tokens and Pₑ is its mean probability. A
/// step's is the mean over its layers with experts and over micro-batches, by their tokens.
#[derive(Clone, Debug)]
pub struct RouterLoss {
    /// Factor of the gradient: coefficient, loss scale.
    coefficient: f64,
    /// One over the step's tokens times its layers with experts.
    normaliser: f64,
    /// Tokens that each row stands for: 0 for padding, several for the row of a prefix that sequences share.
    pub(crate) tokens: Arc<[f32]>,
    sum: Arc<Mutex<f64>>,
}

impl RouterLoss {
    /// The loss of a micro-batch whose rows stand for `tokens` tokens each, of a step of `step_tokens` tokens, in a model with
    /// `layers` layers of experts. Its gradient is multiplied by `coefficient`.
    pub fn new(coefficient: f64, step_tokens: usize, layers: usize, tokens: Vec<f32>) -> Self {
        Self {
            coefficient,
            normaliser: 1.0 / (step_tokens.max(1) * layers.max(1)) as f64,
            tokens: tokens.into(),
            sum: Arc::default(),
        }
    }

    /// Sum over the layers that a graph was traced of, without the coefficient.
    pub fn sum(&self) -> f64 {
        *self.sum.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a layer: the probabilities that its router gives each expert, summed over the tokens. Gives the gradient
    /// with respect to the probability of each expert of a token.
    pub(crate) fn add(&self, probabilities: &[f64], chosen: &[u32], per_token: usize) -> Vec<f64> {
        let mut counts = vec![0.0; probabilities.len()];
        for (row, &tokens) in chosen.chunks(per_token).zip(self.tokens.iter()) {
            for &expert in row {
                counts[expert as usize] += f64::from(tokens);
            }
        }
        let tokens = self.tokens.iter().copied().map(f64::from).sum::<f64>().max(1.0);
        let factor = self.normaliser * counts.len() as f64 / tokens;
        let loss: f64 = counts.iter().zip(probabilities).map(|(c, p)| c * p).sum();
        *self.sum.lock().unwrap_or_else(PoisonError::into_inner) += factor * loss;
        counts.into_iter().map(|c| self.coefficient * factor * c).collect()
    }
}

fn replay(routes: &Routes, [offset, per_token]: [usize; 2], route: impl FnOnce() -> Vec<u32>) -> Vec<u32> {
    let rows = (0..routes.rows()).map(|row| &routes.row(row)[offset..][..per_token]);
    let known = |row: &[u16]| row.iter().all(|&choice| choice != Routes::UNKNOWN);
    if rows.clone().all(known) {
        return rows.flatten().map(|&choice| u32::from(choice)).collect();
    }
    let mut chosen = route();
    for (row, chosen) in rows.zip(chosen.chunks_mut(per_token)) {
        if known(row) {
            for (chosen, &choice) in chosen.iter_mut().zip(row) {
                *chosen = u32::from(choice);
            }
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(rows: &[[u16; 3]]) -> Routes {
        Routes { width: 3, choices: rows.concat() }
    }

    #[test]
    fn rows_go_the_way_that_is_known_and_their_own_where_nothing_is() {
        let known = routes(&[[0, 5, 6], [1, Routes::UNKNOWN, Routes::UNKNOWN], [2, 7, 8]]);
        let routing = Routing::default().replayed(known);
        let route = || vec![1, 2, 3, 4, 5, 6];
        assert_eq!(routing.choose([1, 2], route), [5, 6, 3, 4, 7, 8]);
        // all rows of the first layer are known: nobody asks its router
        let chosen = routing.choose([0, 1], || unreachable!("all rows are known"));
        assert_eq!(chosen, [0, 1, 2]);
    }

    #[test]
    fn what_was_chosen_is_recorded_by_row_and_layer() {
        let routing = Routing::default().recorded(2, 3);
        let _ = routing.choose([1, 2], || vec![4, 5, 6, 7]);
        let _ = routing.choose([0, 1], || vec![2, 3]);
        assert_eq!(routing.take_recorded(), Some(routes(&[[2, 4, 5], [3, 6, 7]])));
    }

    #[test]
    fn rows_are_laid_into_others_as_far_as_there_is_room() {
        let mut recorded = Routes::unknown(3, 3);
        recorded.set(2, &routes(&[[1, 2, 3], [4, 5, 6]]));
        assert_eq!(recorded.row(2), [1, 2, 3]);
        assert_eq!(recorded.row(1), [Routes::UNKNOWN; 3]);
    }
}
