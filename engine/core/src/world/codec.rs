//! Values as the bytes that ranks exchange. Both ends are the same program, so nothing says what is what.

use crate::{Error, Result};
use firebrick_models::routing::Routes;

/// Writes values one behind the other.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// What was written.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// A whole number.
    pub fn number(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// A number, NaN included, to the bit.
    pub fn float(&mut self, value: f64) {
        self.number(value.to_bits());
    }

    /// A text.
    pub fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend(text.as_bytes());
    }

    /// A value that may be absent.
    pub fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.number(u64::from(value.is_some()));
        if let Some(value) = value {
            write(self, value);
        }
    }

    /// Values, and how many there are.
    pub fn list<T>(&mut self, values: impl ExactSizeIterator<Item = T>, mut write: impl FnMut(&mut Self, T)) {
        self.number(values.len() as u64);
        values.for_each(|value| write(self, value));
    }

    /// Numbers.
    pub fn floats(&mut self, values: &[f64]) {
        self.list(values.iter(), |w, &value| w.float(value));
    }

    /// Numbers of four bytes.
    pub fn singles(&mut self, values: &[f32]) {
        self.number(values.len() as u64);
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    /// Token ids.
    pub fn tokens(&mut self, values: &[u32]) {
        self.number(values.len() as u64);
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    /// The experts that tokens went through.
    pub fn routes(&mut self, routes: &Routes) {
        self.number(routes.width() as u64);
        self.number(routes.choices().len() as u64);
        self.0.extend(routes.choices().iter().flat_map(|choice| choice.to_le_bytes()));
    }
}

/// Reads them in the same order.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads what a rank wrote.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let taken = self.0.split_at_checked(count);
        let (taken, rest) = taken.ok_or_else(|| {
            Error::Ranks(
                "a rank wrote less than another expects to read; run the same build of the program on every rank"
                    .into(),
            )
        })?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    /// A whole number.
    ///
    /// # Errors
    /// `Error::Ranks` where fewer bytes are left.
    pub fn number(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A whole number as a length or an index.
    ///
    /// # Errors
    /// As [`Self::number`].
    pub fn count(&mut self) -> Result<usize> {
        Ok(self.number()? as usize)
    }

    /// A number.
    ///
    /// # Errors
    /// As [`Self::number`].
    pub fn float(&mut self) -> Result<f64> {
        Ok(f64::from_bits(self.number()?))
    }

    /// A text.
    ///
    /// # Errors
    /// As [`Self::number`].
    pub fn text(&mut self) -> Result<String> {
        let len = self.count()?;
        Ok(String::from_utf8_lossy(self.take(len)?).into_owned())
    }

    /// A value that may be absent.
    ///
    /// # Errors
    /// As [`Self::number`], and those of `read`.
    pub fn option<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        let there = self.number()? != 0;
        there.then(|| read(self)).transpose()
    }

    /// Values.
    ///
    /// # Errors
    /// As [`Self::number`], and those of `read`.
    pub fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        (0..self.number()?).map(|_| read(self)).collect()
    }

    /// Numbers.
    ///
    /// # Errors
    /// As [`Self::number`].
    pub fn floats(&mut self) -> Result<Vec<f64>> {
        self.list(Self::float)
    }

    /// Numbers of four bytes.
    ///
    /// # Errors
    /// As [`Self::number`].
    pub fn singles(&mut self) -> Result<Vec<f32>> {
        self.list(|r| Ok(f32::from_le_bytes(r.array()?)))
    }

    /// Token ids.
    ///
    /// # Errors
    /// As [`Self::number`].
    pub fn tokens(&mut self) -> Result<Vec<u32>> {
        self.list(|r| Ok(u32::from_le_bytes(r.array()?)))
    }

    /// The experts that tokens went through.
    ///
    /// # Errors
    /// As [`Self::number`].
    pub fn routes(&mut self) -> Result<Routes> {
        let width = self.count()?;
        let choices = self.list(|r| Ok(u16::from_le_bytes(r.array()?)))?;
        Ok(Routes::from_choices(width, choices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_to_the_bit() {
        let mut w = Writer::default();
        w.option(Some(f64::NAN), Writer::float);
        w.option(None, Writer::float);
        w.text("größer");
        w.tokens(&[7, u32::MAX]);
        w.floats(&[-0.0, 1e-310]);
        w.singles(&[0.1]);
        let routes = Routes::from_rows(&[&[0, 7], &[Routes::UNKNOWN, 1]]);
        w.routes(&routes);
        let bytes = w.into_bytes();
        let mut r = Reader::new(&bytes);
        let nan = r.option(Reader::float).unwrap().unwrap();
        assert_eq!(nan.to_bits(), f64::NAN.to_bits());
        assert_eq!(r.option(Reader::float).unwrap(), None);
        assert_eq!(r.text().unwrap(), "größer");
        assert_eq!(r.tokens().unwrap(), [7, u32::MAX]);
        let floats = r.floats().unwrap();
        assert_eq!(
            floats.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
            [(-0.0_f64).to_bits(), 1e-310_f64.to_bits()]
        );
        assert_eq!(r.singles().unwrap(), [0.1]);
        assert_eq!(r.routes().unwrap(), routes);
        let short = r.number().unwrap_err().to_string();
        assert!(short.contains("same build"), "{short}");
    }
}
