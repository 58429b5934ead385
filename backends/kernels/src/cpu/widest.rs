//! The widest vector instructions of this machine.

use pulp::{Arch, WithSimd};

/// Runs an operation with the widest vector instructions of this machine: AVX-512, AVX2 with FMA, Neon, or those of
/// every machine of its kind.
#[inline]
pub(super) fn with_widest<Op: WithSimd>(operation: Op) -> Op::Output {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = avx2_at_most() {
        return pulp::Simd::vectorize(avx2, operation);
    }
    Arch::new().dispatch(operation)
}

/// AVX2 and FMA, where the machine has nothing wider. Burn asks for pulp's feature `x86-v4`, which chooses between
/// AVX-512 and no vector instructions but those of every x86-64 machine, and not for `x86-v3`.
#[cfg(target_arch = "x86_64")]
#[inline]
fn avx2_at_most() -> Option<pulp::x86::V3> {
    use std::sync::OnceLock;
    static FOUND: OnceLock<Option<pulp::x86::V3>> = OnceLock::new();
    *FOUND.get_or_init(|| match Arch::new() {
        Arch::Scalar => pulp::x86::V3::try_new(),
        _ => None,
    })
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use pulp::Simd;

    struct Lanes;

    impl WithSimd for Lanes {
        type Output = usize;

        fn with_simd<S: Simd>(self, _: S) -> usize {
            S::F32_LANES
        }
    }

    #[test]
    fn vectors_are_as_wide_as_the_machine_has_them() {
        let lanes = with_widest(Lanes);
        let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl");
        if wide && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512dq") {
            assert_eq!(lanes, 16);
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            assert_eq!(lanes, 8);
        }
    }
}
