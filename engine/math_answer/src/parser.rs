//! Recursive-descent parser of expressions. No rule inspects a token twice, and brackets nest
//! at most [`MAX_DEPTH`] deep: time is linear and the stack is bounded.

use crate::brackets::{Bracket, brackets};
use crate::expr::{Expr, Function, one_or, times, variable};
use crate::lexer::{Kind, Token};
use crate::units;
use crate::words::{is_greek, is_mathematics};

/// Deepest nesting of brackets, fractions and exponents.
const MAX_DEPTH: usize = 40;

/// Largest number of divisions, exponents and factorials of an answer, each nested in the next.
const MAX_LINKS: usize = 200;

/// Parses expressions from tokens.
pub(crate) struct Parser<'t> {
    tokens: &'t [Token],
    brackets: Vec<Option<Bracket>>,
    pub at: usize,
    depth: usize,
    links: usize,
    /// True if the next bar closes.
    in_bars: bool,
    /// Signs of percent since the last item began.
    pub percents: usize,
    /// The unit of the item.
    pub unit: Option<String>,
}

impl<'t> Parser<'t> {
    /// Creates a parser; `None` if brackets do not match.
    pub fn new(tokens: &'t [Token]) -> Option<Self> {
        Some(Self {
            tokens,
            brackets: brackets(tokens)?,
            at: 0,
            depth: 0,
            links: 0,
            in_bars: false,
            percents: 0,
            unit: None,
        })
    }

    pub fn kind(&self, ahead: usize) -> Option<&'t Kind> {
        self.tokens.get(self.at + ahead).map(|token| &token.kind)
    }

    pub fn symbol(&self) -> Option<char> {
        match self.kind(0) {
            Some(Kind::Symbol(symbol)) => Some(*symbol),
            _ => None,
        }
    }

    /// The symbol that was taken last.
    pub fn before(&self) -> Option<char> {
        match self.tokens.get(self.at.checked_sub(1)?)?.kind {
            Kind::Symbol(symbol) => Some(symbol),
            _ => None,
        }
    }

    /// The bracket that opens here.
    pub fn bracket(&self) -> Option<Bracket> {
        self.brackets.get(self.at).copied().flatten()
    }

    /// Skips the next token if it is this symbol.
    pub fn take(&mut self, symbol: char) -> bool {
        let here = self.symbol() == Some(symbol);
        self.at += usize::from(here);
        here
    }

    /// Counts an operation that deepens the expression; `None` if there are too many.
    fn link(&mut self) -> Option<()> {
        self.links += 1;
        (self.links <= MAX_LINKS).then_some(())
    }

    /// Returns true if a token follows a space.
    fn spaced(&self, ahead: usize) -> bool {
        self.tokens.get(self.at + ahead).is_some_and(|t| t.spaced)
    }

    /// Parses terms with plus and minus between them.
    pub fn sum(&mut self) -> Option<Expr> {
        let mut terms = vec![self.term()?];
        loop {
            match self.symbol() {
                Some('+') => {
                    self.at += 1;
                    terms.push(self.term()?);
                }
                Some('-') => {
                    self.at += 1;
                    terms.push(Expr::Negative(Box::new(self.term()?)));
                }
                _ => break,
            }
        }
        Some(one_or(terms, Expr::Sum))
    }

    /// Takes the signs before a term; true if it is negative.
    fn signs(&mut self) -> bool {
        let mut negative = false;
        while let Some(sign @ ('+' | '-')) = self.symbol() {
            negative ^= sign == '-';
            self.at += 1;
        }
        negative
    }

    /// Parses factors, with or without a sign of multiplication or division between them.
    fn term(&mut self) -> Option<Expr> {
        let negative = self.signs();
        let mut term = self.mixed()?;
        loop {
            if self.take('*') {
                term = times(term, self.signed()?);
            } else if self.take('/') {
                self.link()?;
                term = Expr::Quotient(Box::new([term, self.signed()?]));
            } else if self.starts_factor(&term) {
                term = times(term, self.factor()?);
            } else {
                break;
            }
        }
        Some(if negative { Expr::Negative(Box::new(term)) } else { term })
    }

    fn signed(&mut self) -> Option<Expr> {
        let negative = self.signs();
        let factor = self.factor()?;
        Some(if negative { Expr::Negative(Box::new(factor)) } else { factor })
    }

    /// Parses a factor, or a mixed number: an integer before a fraction of two integers.
    fn mixed(&mut self) -> Option<Expr> {
        let is_integer = matches!(self.kind(0), Some(Kind::Number(_, true)));
        let fraction = matches!(self.kind(1), Some(Kind::Command(name)) if name == "frac");
        let (over, under) = (self.kind(1), self.kind(3));
        let slash = matches!(self.kind(2), Some(Kind::Symbol('/')));
        let has_plain_fraction = matches!((over, under), (Some(Kind::Number(_, true)), Some(Kind::Number(_, true))))
            && slash
            && self.spaced(1);
        let first = self.factor()?;
        if is_integer && fraction {
            let part = self.factor()?;
            let is_fraction = matches!(
                &part,
                Expr::Quotient(pair) if pair.iter().all(|p| matches!(p, Expr::Number(_)))
            );
            return Some(if is_fraction { Expr::Sum(vec![first, part]) } else { times(first, part) });
        }
        if is_integer && has_plain_fraction {
            let over = self.factor()?;
            self.at += 1;
            let part = Expr::Quotient(Box::new([over, self.factor()?]));
            return Some(Expr::Sum(vec![first, part]));
        }
        Some(first)
    }

    /// Returns true if the next token begins another factor of a product without signs.
    fn starts_factor(&self, before: &Expr) -> bool {
        match self.kind(0) {
            Some(Kind::Letters(letters)) => self.is_product(letters, before),
            Some(Kind::Command(name)) => !matches!(
                name.as_str(),
                "\\" | "begin" | "end" | "mathbb" | "emptyset" | "varnothing" | "rfloor" | "rceil"
            ),
            Some(Kind::Number(..)) => {
                // `(2)3` and `x2`, but not `2 3`
                !matches!(before, Expr::Number(_)) && !self.spaced(0)
            }
            Some(Kind::Symbol('(' | '{' | '[')) => self.bracket().is_some_and(|b| !b.separated),
            Some(Kind::Symbol('|')) => !self.in_bars,
            Some(Kind::Symbol('√' | 'π' | '∞')) => true,
            _ => false,
        }
    }

    /// Returns true if letters are variables, constants or a function, not a word or a unit after a number.
    fn is_product(&self, letters: &str, before: &Expr) -> bool {
        let after_number = matches!(before, Expr::Number(_) | Expr::Quotient(_) | Expr::Sum(_));
        let last = self.at + 1 == self.tokens.len();
        let unit = units::unit(letters).is_some() && after_number;
        if unit && (letters.len() > 1 || (last && self.spaced(0))) {
            return false;
        }
        is_mathematics(letters)
    }

    /// Parses a base with its exponent and the signs after it.
    fn factor(&mut self) -> Option<Expr> {
        let mut base = self.primary()?;
        loop {
            match self.symbol() {
                Some('!') => {
                    self.link()?;
                    base = Expr::Apply(Function::Factorial, Box::new(base));
                    self.at += 1;
                }
                Some('%') => {
                    self.percents += 1;
                    self.at += 1;
                }
                Some('°') => {
                    self.unit = Some("deg".into());
                    self.at += 1;
                }
                Some('_') if matches!(base, Expr::Number(_)) => {
                    self.at += 1;
                    let base = self.argument()?;
                    self.unit = Some(format!("base {base}"));
                }
                Some('^') => {
                    self.at += 1;
                    if self.degrees() {
                        continue;
                    }
                    self.link()?;
                    let exponent = self.exponent()?;
                    base = Expr::Power(Box::new([base, exponent]));
                }
                _ => return Some(base),
            }
        }
    }

    /// Takes a degree sign as exponent.
    fn degrees(&mut self) -> bool {
        let bare = self.symbol() == Some('°');
        let symbol = |kind: Option<&Kind>, c| matches!(kind, Some(Kind::Symbol(s)) if *s == c);
        let braced = symbol(self.kind(0), '{') && symbol(self.kind(1), '°') && symbol(self.kind(2), '}');
        if bare || braced {
            self.at += if bare { 1 } else { 3 };
            self.unit = Some("deg".into());
        }
        bare || braced
    }

    fn exponent(&mut self) -> Option<Expr> {
        let negative = self.signs();
        let exponent = self.nested(Self::primary)?;
        // powers of powers associate to the right
        let exponent = match self.symbol() {
            Some('^') => {
                self.at += 1;
                let next = self.nested(Self::exponent)?;
                Expr::Power(Box::new([exponent, next]))
            }
            _ => exponent,
        };
        Some(if negative { Expr::Negative(Box::new(exponent)) } else { exponent })
    }

    /// Applies a rule one level deeper; `None` if that is too deep.
    fn nested<T>(&mut self, rule: fn(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth == MAX_DEPTH {
            return None;
        }
        self.depth += 1;
        let result = rule(self);
        self.depth -= 1;
        result
    }

    /// Parses the content of a bracket.
    fn group(&mut self) -> Option<Expr> {
        let bracket = self.bracket().filter(|bracket| !bracket.separated)?;
        self.at += 1;
        let bars = std::mem::take(&mut self.in_bars);
        let inner = self.nested(Self::sum)?;
        self.in_bars = bars;
        (self.at == bracket.close).then(|| self.at += 1)?;
        Some(inner)
    }

    /// Parses the argument of a command: a group, or one token.
    pub fn argument(&mut self) -> Option<Expr> {
        match self.kind(0)? {
            Kind::Symbol('{') => self.group(),
            Kind::Number(..) | Kind::Letters(_) | Kind::Command(_) => self.nested(Self::primary),
            _ => None,
        }
    }

    fn primary(&mut self) -> Option<Expr> {
        match self.kind(0)? {
            Kind::Number(number, _) => {
                self.at += 1;
                Some(Expr::Number(number.clone()))
            }
            Kind::Letters(letters) => self.letters(letters),
            Kind::Command(name) => self.command(name),
            Kind::Words(words) => {
                let name = words.chars().all(char::is_alphabetic) && words.len() == 1;
                self.at += 1;
                name.then(|| Expr::Variable(words.clone()))
            }
            Kind::Symbol('(' | '{' | '[') => self.group(),
            Kind::Symbol('|') => {
                self.at += 1;
                let bars = std::mem::replace(&mut self.in_bars, true);
                let inner = self.nested(Self::sum)?;
                self.in_bars = bars;
                self.take('|').then(|| Expr::Apply(Function::Abs, Box::new(inner)))
            }
            Kind::Symbol('√') => self.square_root(),
            Kind::Symbol('π') => Some(self.constant(Expr::Pi)),
            Kind::Symbol('∞') => Some(self.constant(Expr::Infinity)),
            Kind::Symbol(_) => None,
        }
    }

    /// Parses a square root at its sign.
    fn square_root(&mut self) -> Option<Expr> {
        self.at += 1;
        let radicand = self.nested(Self::primary)?;
        Some(Expr::Root(Box::new([Expr::whole(2), radicand])))
    }

    fn constant(&mut self, constant: Expr) -> Expr {
        self.at += 1;
        constant
    }

    fn letters(&mut self, letters: &str) -> Option<Expr> {
        let lower = letters.to_lowercase();
        match lower.as_str() {
            "pi" => return Some(self.constant(Expr::Pi)),
            "inf" | "infinity" | "oo" => return Some(self.constant(Expr::Infinity)),
            "sqrt" => return self.square_root(),
            "log" => return self.logarithm(),
            _ => {}
        }
        if let Some(function) = Function::named(&lower).filter(|_| letters.len() > 1) {
            return self.function(function);
        }
        if !is_mathematics(letters) {
            return None;
        }
        self.at += 1;
        let mut factors: Vec<Expr> = letters.chars().map(variable).collect();
        if let (Some(Expr::Variable(name)), Some('_')) = (factors.last_mut(), self.symbol()) {
            self.at += 1;
            let (first, start) = (name.clone(), self.at);
            let index = self.argument();
            let index = index.map_or_else(|| format!("t{start}"), |index| index.to_string());
            factors.pop();
            factors.push(Expr::Variable(format!("{first}_{index}")));
        }
        Some(one_or(factors, Expr::Product))
    }

    fn command(&mut self, name: &str) -> Option<Expr> {
        self.at += 1;
        let pair = |parser: &mut Self| Some(Box::new([parser.argument()?, parser.argument()?]));
        match name {
            "frac" => pair(self).map(Expr::Quotient),
            "binom" => pair(self).map(Expr::Binomial),
            "sqrt" => {
                let index = match self.symbol() {
                    Some('[') => self.group()?,
                    _ => Expr::whole(2),
                };
                Some(Expr::Root(Box::new([index, self.argument()?])))
            }
            "pi" => Some(Expr::Pi),
            "infty" => Some(Expr::Infinity),
            "log" | "lg" => {
                self.at -= 1;
                self.logarithm()
            }
            "lfloor" | "lceil" => {
                let inner = self.nested(Self::sum)?;
                let closes = matches!(self.kind(0), Some(Kind::Command(c)) if c[1..] == name[1..]);
                self.at += 1;
                let function = match name {
                    "lfloor" => Function::Floor,
                    _ => Function::Ceil,
                };
                closes.then(|| Expr::Apply(function, Box::new(inner)))
            }
            _ => match Function::named(name) {
                Some(function) => {
                    self.at -= 1;
                    self.function(function)
                }
                None if is_greek(name) => Some(Expr::Variable(name.to_owned())),
                None => None,
            },
        }
    }

    /// Parses a logarithm with its base, by default 10; `ln` is a function.
    fn logarithm(&mut self) -> Option<Expr> {
        self.at += 1;
        let base = if self.take('_') { self.argument()? } else { Expr::whole(10) };
        let argument = self.nested(Self::operand)?;
        Some(Expr::Log(Box::new([base, argument])))
    }

    /// Parses a function with its argument: `\sin^2 x`, `\sin 2x`, `sin(x)`.
    fn function(&mut self, function: Function) -> Option<Expr> {
        self.at += 1;
        let exponent = if self.take('^') { Some(self.argument()?) } else { None };
        let unit = self.unit.take();
        let mut argument = self.nested(Self::operand)?;
        if self.unit.as_deref() == Some("deg") {
            let turn = Expr::Quotient(Box::new([Expr::Pi, Expr::whole(180)]));
            argument = times(argument, turn);
        }
        self.unit = unit;
        let value = Expr::Apply(function, Box::new(argument));
        Some(match exponent {
            Some(exponent) => Expr::Power(Box::new([value, exponent])),
            None => value,
        })
    }

    /// Parses the argument of a function: the content of its bracket, or the factors up to the next sign.
    fn operand(&mut self) -> Option<Expr> {
        if matches!(self.symbol(), Some('(' | '{' | '[')) {
            return self.group();
        }
        let mut product = self.factor()?;
        let function = |kind: Option<&Kind>| {
            let Some(Kind::Letters(name) | Kind::Command(name)) = kind else {
                return false;
            };
            Function::named(name).is_some() || name == "log"
        };
        while self.starts_factor(&product) && !function(self.kind(0)) && !matches!(self.symbol(), Some('(' | '[' | '|'))
        {
            product = times(product, self.factor()?);
        }
        Some(product)
    }
}
