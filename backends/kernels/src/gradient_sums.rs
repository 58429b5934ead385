//! Sums of gradients, to which products of a backward pass add those of their matrices: in f32, where a tape would have
//! them rounded, and without a kernel that widens and one that adds.

use super::autodiff::KernelBackend;
use super::operations::on_backend;
use burn::backend::autodiff::NodeId;
use burn::tensor::{Gradients, Tensor};
use std::cell::RefCell;
use std::collections::HashMap;

/// The sum of a leaf's gradients, empty until the first.
pub(super) type Sum = Option<Tensor<2>>;

thread_local! {
    /// Sums of the backward pass that this thread runs.
    static SUMS: RefCell<HashMap<NodeId, Sum>> = RefCell::default();
}

/// Forgets the sums of a backward pass that panics.
struct Forget;

impl Drop for Forget {
    fn drop(&mut self) {
        SUMS.take();
    }
}

/// Runs the backward pass from a root beside the sums of some leaves, in f32 or wider, each empty until the first
/// gradient. Sums come back in the order of their leaves. The tape has the gradients that no product added to a sum.
pub fn backward_with_sums(root: Tensor<1>, leaves: Vec<(&Tensor<2>, Sum)>) -> (Gradients, Vec<Sum>) {
    let leaves = leaves.into_iter().map(|(tensor, sum)| (on_backend!(&tensor.device(), leaf(tensor)), sum));
    let (leaves, sums): (Vec<Option<NodeId>>, Vec<Sum>) = leaves.unzip();
    SUMS.set(leaves.iter().zip(sums).filter_map(|(leaf, sum)| Some(((*leaf)?, sum))).collect());
    let forget = Forget;
    let tape = root.backward();
    drop(root);
    let mut sums = SUMS.take();
    drop(forget);
    (tape, leaves.iter().map(|leaf| sums.remove(leaf.as_ref()?).flatten()).collect())
}

/// The leaf that a tensor is, if it gets a gradient.
pub(super) fn leaf<B: KernelBackend>(tensor: &Tensor<2>) -> Option<NodeId> {
    tensor.is_require_grad().then(|| B::autodiff_primitive(tensor.clone()).id())
}

/// Hands the sums of some leaves to `add`, which gives each with one more gradient. False where a leaf has no sum.
pub(super) fn add(leaves: &[NodeId], add: impl FnOnce(Vec<Sum>) -> Vec<Tensor<2>>) -> bool {
    // taken out, so that `add` has the only copies
    let taken = SUMS.with_borrow_mut(|sums| {
        let all = leaves.iter().all(|leaf| sums.contains_key(leaf));
        all.then(|| leaves.iter().map(|leaf| sums.remove(leaf).flatten()).collect())
    });
    let Some(taken) = taken else {
        return false;
    };
    let added = leaves.iter().zip(add(taken));
    SUMS.with_borrow_mut(|sums| sums.extend(added.map(|(leaf, sum)| (*leaf, Some(sum)))));
    true
}
