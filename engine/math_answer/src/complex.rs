//! Complex numbers in double precision, principal branches.

use std::ops::{Add, Div, Mul, Neg, Sub};

/// A complex number.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Complex {
    pub re: f64,
    pub im: f64,
}

impl Complex {
    pub fn new(re: f64, im: f64) -> Self {
        Self { re, im }
    }

    pub fn real(re: f64) -> Self {
        Self { re, im: 0.0 }
    }

    pub fn abs(self) -> f64 {
        self.re.hypot(self.im)
    }

    pub fn is_finite(self) -> bool {
        self.re.is_finite() && self.im.is_finite()
    }

    pub fn is_zero(self) -> bool {
        self.re == 0.0 && self.im == 0.0
    }

    /// Whether the imaginary part is nothing but rounding.
    pub fn is_real(self) -> bool {
        self.im.abs() <= 1e-12 * self.abs().max(1e-3)
    }

    pub fn exp(self) -> Self {
        let size = self.re.exp();
        if self.im == 0.0 {
            return Self::real(size);
        }
        Self::new(size * self.im.cos(), size * self.im.sin())
    }

    pub fn ln(self) -> Self {
        Self::new(self.abs().ln(), self.im.atan2(self.re))
    }

    pub fn pow(self, exponent: Self) -> Self {
        if exponent.is_zero() {
            return Self::real(1.0);
        }
        if self.is_zero() {
            return if exponent.re > 0.0 { self } else { Self::real(f64::NAN) };
        }
        let whole = exponent.im == 0.0 && exponent.re.fract() == 0.0;
        if self.im == 0.0 && (self.re > 0.0 || whole) && exponent.im == 0.0 {
            return Self::real(self.re.powf(exponent.re));
        }
        if whole && exponent.re.abs() <= 64.0 {
            let power = (0..exponent.re.abs() as u32).fold(Self::real(1.0), |all, _| all * self);
            return if exponent.re > 0.0 { power } else { Self::real(1.0) / power };
        }
        (self.ln() * exponent).exp()
    }

    pub fn sqrt(self) -> Self {
        if self.im == 0.0 {
            return if self.re >= 0.0 { Self::real(self.re.sqrt()) } else { Self::new(0.0, (-self.re).sqrt()) };
        }
        self.pow(Self::real(0.5))
    }

    pub fn sin(self) -> Self {
        Self::new(self.re.sin() * self.im.cosh(), self.re.cos() * self.im.sinh())
    }

    pub fn cos(self) -> Self {
        Self::new(self.re.cos() * self.im.cosh(), -self.re.sin() * self.im.sinh())
    }

    /// Half the difference of the exponentials, or half their sum.
    pub fn hyperbolic(self, sign: f64) -> Self {
        (self.exp() + (-self).exp() * Self::real(sign)) * Self::real(0.5)
    }
}

impl Add for Complex {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self::new(self.re + other.re, self.im + other.im)
    }
}

impl Sub for Complex {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self::new(self.re - other.re, self.im - other.im)
    }
}

impl Mul for Complex {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        if self.im == 0.0 && other.im == 0.0 {
            return Self::real(self.re * other.re);
        }
        Self::new(self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re)
    }
}

impl Div for Complex {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        if self.im == 0.0 && other.im == 0.0 {
            return Self::real(self.re / other.re);
        }
        let size = other.re * other.re + other.im * other.im;
        let product = self * Self::new(other.re, -other.im);
        Self::new(product.re / size, product.im / size)
    }
}

impl Neg for Complex {
    type Output = Self;

    fn neg(self) -> Self {
        Self::new(-self.re, -self.im)
    }
}
