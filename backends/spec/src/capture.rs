//! Decoding steps that are captured as graphs.

use crate::Backend;

/// Graphs that are kept at a time: of the shapes of steps that came up last. Each keeps memory that nothing else gets.
/// While no sequence enters, a number of rows that is passed does not come back; while some do, rows vary among few
/// sizes.
pub const MAX_GRAPHS: usize = 8;

/// Rows between two sizes, up to [`FINE_ROWS`] and above.
const FINE: usize = 8;
const COARSE: usize = 32;

/// Rows up to which sizes are [`FINE`]: a step of so few takes as long as its weights take to be read.
const FINE_ROWS: usize = 64;

/// Decoding steps that are captured as graphs and replayed, by vLLM's names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaGraphs {
    /// No step is. Where absent, steps are captured on CUDA, and wherever sizes are given.
    pub enforce_eager: Option<bool>,
    /// The numbers of rows whose steps are: where absent, the multiples of 8 up to 64 and of 32 above that are less than
    /// the sequences at a time, and that number.
    pub capture_sizes: Option<Vec<usize>>,
}

impl CudaGraphs {
    /// The numbers of rows whose steps are captured on a backend where so many sequences are sampled at a time,
    /// ascending.
    pub fn sizes(&self, backend: Backend, max_num_seqs: usize) -> Vec<usize> {
        let by_rule = || backend != Backend::Cuda && self.capture_sizes.is_none();
        if backend == Backend::Cpu || self.enforce_eager.unwrap_or_else(by_rule) {
            return Vec::new();
        }
        let steps = || {
            let fine = (FINE..=FINE_ROWS).step_by(FINE);
            let coarse = (FINE_ROWS + COARSE..max_num_seqs).step_by(COARSE);
            let below = fine.chain(coarse).take_while(|&size| size < max_num_seqs);
            below.chain([max_num_seqs]).collect()
        };
        let mut sizes = self.capture_sizes.clone().unwrap_or_else(steps);
        sizes.retain(|&size| size <= max_num_seqs);
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(eager: Option<bool>, listed: Option<&[usize]>, backend: Backend) -> Vec<usize> {
        let graphs = CudaGraphs { enforce_eager: eager, capture_sizes: listed.map(<[usize]>::to_vec) };
        graphs.sizes(backend, 24)
    }

    #[test]
    fn steps_are_captured_on_cuda_unless_all_are_to_run_eagerly() {
        assert_eq!(sizes(None, None, Backend::Cuda), [8, 16, 24]);
        assert!(sizes(Some(true), None, Backend::Cuda).is_empty());
        assert_eq!(sizes(None, Some(&[24, 8, 8]), Backend::Cuda), [8, 24]);
    }

    #[test]
    fn sizes_are_multiples_of_8_up_to_64_and_of_32_above_and_the_largest_step() {
        let sizes = |max_num_seqs| CudaGraphs::default().sizes(Backend::Cuda, max_num_seqs);
        assert_eq!(sizes(1), [1]);
        assert_eq!(sizes(8), [8]);
        assert_eq!(sizes(60), [8, 16, 24, 32, 40, 48, 56, 60]);
        assert_eq!(sizes(150), [8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 150]);
        assert_eq!(sizes(512).len(), 22);
    }

    #[test]
    fn other_gpus_capture_where_they_are_asked_to_and_a_cpu_never_does() {
        assert!(sizes(None, None, Backend::Wgpu).is_empty());
        assert_eq!(sizes(Some(false), None, Backend::Wgpu), [8, 16, 24]);
        assert_eq!(sizes(None, Some(&[8]), Backend::Vulkan), [8]);
        assert!(sizes(Some(false), Some(&[8]), Backend::Cpu).is_empty());
    }

    #[test]
    fn no_step_of_more_rows_than_there_are_sequences_is_captured() {
        assert_eq!(sizes(None, Some(&[8, 32]), Backend::Cuda), [8]);
    }
}
