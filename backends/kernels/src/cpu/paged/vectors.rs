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

    /// The numbers at an address.
    ///
    /// # Safety
    /// There is a vector of them.
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> Self::Vector<S> {
        // SAFETY: the caller's promise; a vector is as many numbers side by side.
        unsafe { from.cast::<Self::Vector<S>>().read_unaligned() }
    }

    /// Writes numbers to an address.
    ///
    /// # Safety
    /// There is room for a vector.
    #[inline(always)]
    unsafe fn store<S: Simd>(to: *mut Self, vector: Self::Vector<S>) {
        // SAFETY: as above.
        unsafe { to.cast::<Self::Vector<S>>().write_unaligned(vector) }
    }
}

/// Implements [`Vectors`] by a type of vectors of `pulp` and its operations.
macro_rules! vectors {
    ($float:ty, $vector:ident, $lanes:ident, $splat:ident, $mul_add:ident) => {
        impl Vectors for $float {
            type Vector<S: Simd> = S::$vector;

            #[inline(always)]
            fn lanes<S: Simd>() -> usize {
                S::$lanes
            }

            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: Self) -> S::$vector {
                simd.$splat(x)
            }

            #[inline(always)]
            fn mul_add<S: Simd>(simd: S, a: S::$vector, b: S::$vector, c: S::$vector) -> S::$vector {
                simd.$mul_add(a, b, c)
            }
        }
    };
}
vectors!(f32, f32s, F32_LANES, splat_f32s, mul_add_e_f32s);
vectors!(f64, f64s, F64_LANES, splat_f64s, mul_add_e_f64s);

/// A number as a pool has it, for queries in `T`.
pub(super) trait Stored<T: Vectors>: Copy + Sync {
    /// The number, or its code.
    fn widen(self) -> T;

    /// The numbers or codes at an address.
    ///
    /// # Safety
    /// There is a vector of them.
    unsafe fn vector<S: Simd>(from: *const Self) -> T::Vector<S>;
}

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
