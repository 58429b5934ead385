//! Vectors of the machine's width, of f32 or f64.

use crate::cpu::real::Real;
use pulp::Simd;

/// f32 or f64 in vectors.
pub(super) trait Vectors: Real {
    type Vector<S: Simd>: Copy;

    /// Numbers of a vector.
    fn lanes<S: Simd>() -> usize;
    fn splat<S: Simd>(simd: S, x: Self) -> Self::Vector<S>;
    /// `a · b + c`.
    fn mul_add<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>, c: Self::Vector<S>) -> Self::Vector<S>;
    fn plus<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;

    /// The numbers at an address.
    ///
    /// # Safety
    /// There is a vector of them.
    #[allow(unsafe_code, reason = "bounds checks of every vector would cost as much as the products")]
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> Self::Vector<S> {
        // SAFETY: the caller's promise; a vector is as many numbers side by side.
        unsafe { from.cast::<Self::Vector<S>>().read_unaligned() }
    }

    /// Writes numbers to an address.
    ///
    /// # Safety
    /// There is room for a vector.
    #[allow(unsafe_code, reason = "as above")]
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, vector: Self::Vector<S>) {
        // SAFETY: as above.
        unsafe { to.cast::<Self::Vector<S>>().write_unaligned(vector) }
    }
}

impl Vectors for f32 {
    type Vector<S: Simd> = S::f32s;

    #[inline(always)]
    fn lanes<S: Simd>() -> usize {
        S::F32_LANES
    }

    #[inline(always)]
    fn splat<S: Simd>(simd: S, x: Self) -> S::f32s {
        simd.splat_f32s(x)
    }

    #[inline(always)]
    fn mul_add<S: Simd>(simd: S, a: S::f32s, b: S::f32s, c: S::f32s) -> S::f32s {
        simd.mul_add_e_f32s(a, b, c)
    }

    #[inline(always)]
    fn plus<S: Simd>(simd: S, a: S::f32s, b: S::f32s) -> S::f32s {
        simd.add_f32s(a, b)
    }
}

impl Vectors for f64 {
    type Vector<S: Simd> = S::f64s;

    #[inline(always)]
    fn lanes<S: Simd>() -> usize {
        S::F64_LANES
    }

    #[inline(always)]
    fn splat<S: Simd>(simd: S, x: Self) -> S::f64s {
        simd.splat_f64s(x)
    }

    #[inline(always)]
    fn mul_add<S: Simd>(simd: S, a: S::f64s, b: S::f64s, c: S::f64s) -> S::f64s {
        simd.mul_add_e_f64s(a, b, c)
    }

    #[inline(always)]
    fn plus<S: Simd>(simd: S, a: S::f64s, b: S::f64s) -> S::f64s {
        simd.add_f64s(a, b)
    }
}

/// A number as a pool has it, for queries in `T`.
pub(super) trait Stored<T: Vectors>: Copy + Sync {
    /// The number, or its code.
    fn widen(self) -> T;

    /// The numbers or codes at an address.
    ///
    /// # Safety
    /// There is a vector of them.
    #[allow(unsafe_code, reason = "as above")]
    unsafe fn vector<S: Simd>(from: *const Self) -> T::Vector<S>;
}

#[allow(unsafe_code, reason = "as above")]
impl<T: Vectors> Stored<T> for T {
    #[inline(always)]
    fn widen(self) -> T {
        self
    }

    #[inline(always)]
    unsafe fn vector<S: Simd>(from: *const T) -> T::Vector<S> {
        // SAFETY: the caller's promise.
        unsafe { T::load::<S>(from) }
    }
}

/// Widens as many codes as a vector has numbers.
macro_rules! codes {
    ($($float:ty),*) => {$(
        #[allow(unsafe_code, reason = "as above")]
        impl Stored<$float> for i8 {
            #[inline(always)]
            fn widen(self) -> $float {
                <$float>::from(self)
            }

            #[inline(always)]
            unsafe fn vector<S: Simd>(from: *const Self) -> <$float as Vectors>::Vector<S> {
                // no machine has wider vectors
                let mut wide: [$float; 16] = [0.0; 16];
                // SAFETY: the caller's promise.
                unsafe {
                    for (i, wide) in wide[..<$float as Vectors>::lanes::<S>()].iter_mut().enumerate() {
                        *wide = <$float>::from(*from.add(i));
                    }
                    <$float as Vectors>::load::<S>(wide.as_ptr())
                }
            }
        }
    )*};
}

codes!(f32, f64);
