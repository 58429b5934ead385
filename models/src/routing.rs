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
    #[must_use]
    pub fn unknown(rows: usize, width: usize) -> Self {
        Self { width, choices: vec![Self::UNKNOWN; rows * width] }
    }

    /// Rows of one width.
    ///
    /// # Panics
    /// Where they have several.
    #[must_use]
    pub fn from_rows(rows: &[&[u16]]) -> Self {
        let width = rows.first().map_or(0, |row| row.len());
        assert!(rows.iter().all(|row| row.len() == width), "rows of one width");
        Self { width, choices: rows.concat() }
    }

    /// Rows of a width, one behind the other.
    ///
    /// # Panics
    /// Where the last is not whole.
    #[must_use]
    pub fn from_choices(width: usize, choices: Vec<u16>) -> Self {
        assert_eq!(choices.len() % width.max(1), 0, "whole rows");
        Self { width, choices }
    }

    /// The choices of all rows, one behind the other.
    #[must_use]
    pub fn choices(&self) -> &[u16] {
        &self.choices
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.choices.len().checked_div(self.width).unwrap_or(0)
    }

    /// Choices of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The choices of a row.
    #[must_use]
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

    /// Makes room for so many rows.
    pub(crate) fn resize(&mut self, rows: usize) {
        self.choices.resize(rows * self.width, Self::UNKNOWN);
    }

    pub(crate) fn set_row(&mut self, index: usize, row: &[u16]) {
        self.choices[index * self.width..][..self.width].copy_from_slice(row);
    }

    /// Copies blocks of so many rows over others: `pairs` are source and target.
    pub(crate) fn copy_blocks(&mut self, pairs: &[(u32, u32)], rows: usize) {
        let size = rows * self.width;
        for &(source, target) in pairs {
            let [from, to] = [source, target].map(|block| block as usize * size);
            self.choices.copy_within(from..from + size, to);
        }
    }
}

/// What a forward pass does with routes: by default each router chooses, and nobody hears of it.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    replayed: Option<Arc<Routes>>,
    recorded: Option<Arc<Mutex<Routes>>>,
}

impl Routing {
    /// Rows go the way that is known; routers choose for rows of which nothing is.
    #[must_use]
    pub fn replayed(mut self, routes: Routes) -> Self {
        self.replayed = Some(Arc::new(routes));
        self
    }

    /// The routes of so many rows are kept, for [`Self::take_recorded`].
    #[must_use]
    pub fn recorded(mut self, rows: usize, width: usize) -> Self {
        self.recorded = Some(Arc::new(Mutex::new(Routes::unknown(rows, width))));
        self
    }

    /// The routes that were recorded.
    #[must_use]
    pub fn take_recorded(&self) -> Option<Routes> {
        let recorded = self.recorded.as_ref()?;
        let mut routes = recorded.lock().unwrap_or_else(PoisonError::into_inner);
        Some(std::mem::take(&mut *routes))
    }

    /// The choices of all rows in the layer whose choices begin at `offset`, `own` for rows of which nothing is known.
    pub(crate) fn choose(&self, [offset, per_token]: [usize; 2], own: impl FnOnce() -> Vec<u32>) -> Vec<u32> {
        let chosen = match &self.replayed {
            None => own(),
            Some(routes) => replay(routes, [offset, per_token], own),
        };
        if let Some(recorded) = &self.recorded {
            let mut routes = recorded.lock().unwrap_or_else(PoisonError::into_inner);
            for (row, own) in chosen.chunks(per_token).enumerate() {
                let start = row * routes.width + offset;
                for (place, &expert) in routes.choices[start..].iter_mut().zip(own) {
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
    /// Which rows are tokens; the others are padding.
    pub(crate) tokens: Arc<[bool]>,
    sum: Arc<Mutex<f64>>,
}

impl RouterLoss {
    /// The loss of a micro-batch with these rows, of a step of `all` tokens, in a model with so many layers of experts.
    /// Its gradient is multiplied by `coefficient`.
    #[must_use]
    pub fn new(coefficient: f64, all: usize, layers: usize, tokens: Vec<bool>) -> Self {
        Self {
            coefficient,
            normaliser: 1.0 / (all.max(1) * layers.max(1)) as f64,
            tokens: tokens.into(),
            sum: Arc::default(),
        }
    }

    /// What the layers that a graph was traced of have added, without the coefficient.
    #[must_use]
    pub fn sum(&self) -> f64 {
        *self.sum.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a layer: the probabilities that its router gives each expert, summed over the tokens. Gives the gradient
    /// with respect to the probability of each expert of a token.
    pub(crate) fn add(&self, probabilities: &[f64], chosen: &[u32], per_token: usize) -> Vec<f64> {
        let mut counts = vec![0.0; probabilities.len()];
        let choices = chosen.chunks(per_token).zip(self.tokens.iter());
        for &expert in choices.filter(|(_, token)| **token).flat_map(|(own, _)| own) {
            counts[expert as usize] += 1.0;
        }
        let tokens = self.tokens.iter().filter(|token| **token).count().max(1) as f64;
        let factor = self.normaliser * counts.len() as f64 / tokens;
        let loss: f64 = counts.iter().zip(probabilities).map(|(c, p)| c * p).sum();
        *self.sum.lock().unwrap_or_else(PoisonError::into_inner) += factor * loss;
        let gradient = counts.into_iter().map(|c| self.coefficient * factor * c);
        gradient.collect()
    }
}

fn replay(routes: &Routes, [offset, per_token]: [usize; 2], own: impl FnOnce() -> Vec<u32>) -> Vec<u32> {
    let rows = (0..routes.rows()).map(|row| &routes.row(row)[offset..][..per_token]);
    let known = |row: &[u16]| row.iter().all(|&choice| choice != Routes::UNKNOWN);
    if rows.clone().all(known) {
        return rows.flatten().map(|&choice| u32::from(choice)).collect();
    }
    let mut chosen = own();
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
        let own = || vec![1, 2, 3, 4, 5, 6];
        assert_eq!(routing.choose([1, 2], own), [5, 6, 3, 4, 7, 8]);
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
        let mut all = Routes::unknown(3, 3);
        all.set(2, &routes(&[[1, 2, 3], [4, 5, 6]]));
        assert_eq!(all.row(2), [1, 2, 3]);
        assert_eq!(all.row(1), [Routes::UNKNOWN; 3]);
    }
}
