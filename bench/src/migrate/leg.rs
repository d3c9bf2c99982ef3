//! The kinds of moves, and how a side is led through them.

use anyhow::{Context, Result};

use super::case::Case;
use super::guest::{Control, Moved, Size, writer};

/// A kind of move. Where a VM has all its memory in DRAM, that is "all"; "half" is half of it, with the rest in swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// From all of its memory in DRAM to all.
    Ideal,
    /// From all of its memory in DRAM to half.
    Half,
    /// From half of its memory in DRAM to all.
    Out,
    /// From half of its memory in DRAM to half.
    Both,
    /// As `Ideal`, and half of the pages are written meanwhile.
    WrittenIdeal,
    /// As `Half`, and half of the pages are written meanwhile.
    WrittenHalf,
    /// All to all by post-copy, and pages are read at random meanwhile.
    Postcopy,
}

/// What the guest does during [`Leg::Postcopy`]: what it reads is at the source, mostly.
const READER: &str = "run random passes=1 write=0";

impl Leg {
    pub const ALL: [Leg; 7] = [
        Self::Ideal,
        Self::Half,
        Self::Out,
        Self::WrittenIdeal,
        Self::WrittenHalf,
        Self::Both,
        // The last one: where there is none it is refused, which is the end of a VM here.
        Self::Postcopy,
    ];

    pub fn is_from_half(self) -> bool {
        matches!(self, Self::Out | Self::Both)
    }

    pub fn into_half(self) -> bool {
        matches!(self, Self::Half | Self::WrittenHalf | Self::Both)
    }

    pub fn is_written(self) -> bool {
        matches!(self, Self::WrittenIdeal | Self::WrittenHalf)
    }

    pub fn text(self) -> &'static str {
        match self {
            Self::Ideal => "idle, all to all",
            Self::Half => "idle, all to half",
            Self::Out => "idle, half to all",
            Self::Both => "idle, half to half",
            Self::WrittenIdeal => "half rewritten, all to all",
            Self::WrittenHalf => "half rewritten, all to half",
            Self::Postcopy => "post-copy, all to all",
        }
    }
}

/// All legs of one side.
#[derive(Debug, Default)]
pub struct Cases {
    cases: [Case; Leg::ALL.len()],
}

impl Cases {
    pub fn of(&self, leg: Leg) -> &Case {
        &self.cases[leg as usize]
    }

    fn of_mut(&mut self, leg: Leg) -> &mut Case {
        &mut self.cases[leg as usize]
    }
}

/// A VM that moves to and fro.
pub trait Side {
    /// Who it is, for people.
    const NAME: &'static str;

    fn control(&mut self) -> &mut Control;
    /// What the guest said of the command by which it wrote while it moved.
    fn said(&self) -> &[String] {
        &[]
    }
    /// Whether half of its memory is in swap.
    fn is_half(&self) -> bool;
    /// Moves to the other host, into half or all. It begins to write by the command, if there is one, when memory begins to be sent.
    ///
    /// # Errors
    /// It does not move.
    fn only_move(&mut self, half: bool, write: Option<&str>) -> Result<Moved>;
    /// Moves into all by post-copy. The guest begins the command meanwhile.
    ///
    /// # Errors
    /// It does not move.
    fn postcopy(&mut self, command: &str) -> Result<Moved>;
    /// As [`Side::only_move`], and the guest verifies its memory there.
    ///
    /// # Errors
    /// It does not move, or a page is wrong.
    fn move_into(&mut self, half: bool, write: Option<&str>) -> Result<Moved> {
        let moved = self.only_move(half, write)?;
        self.control().command("verify").with_context(|| self.state())?;
        Ok(moved)
    }
    /// What is known of the guest, when something is wrong.
    fn state(&self) -> String {
        "its memory is right".to_owned()
    }
    /// Looks at what a leg has left.
    ///
    /// # Errors
    /// What is measured by that cannot be.
    fn moved(&mut self, _leg: Leg, _moved: &Moved) -> Result<()> {
        Ok(())
    }
}

/// Why a VM went no further, and at which of its legs.
pub struct Stopped {
    at: usize,
    error: anyhow::Error,
}

/// Leads one VM through legs. One that failed is not used any more.
///
/// # Errors
/// A leg failed.
pub fn lead(
    side: &mut impl Side,
    legs: &[Leg],
    size: Size,
    write: &mut Option<String>,
    cases: &mut Cases,
) -> Result<(), Stopped> {
    for (at, leg) in legs.iter().enumerate() {
        let moved = one(side, *leg, size, write).map_err(|error| Stopped { at, error })?;
        moved.show(&name_of(side, *leg));
        cases.of_mut(*leg).add(moved);
        if let Err(error) = side.moved(*leg, &moved) {
            eprintln!("migrate: {}: {error:#}", name_of(side, *leg));
        }
    }
    Ok(())
}

fn name_of<S: Side>(_side: &S, leg: Leg) -> String {
    format!("{}, {}", S::NAME, leg.text())
}

fn one(side: &mut impl Side, leg: Leg, size: Size, write: &mut Option<String>) -> Result<Moved> {
    let command = match write {
        _ if !leg.is_written() => None,
        Some(command) => Some(command.clone()),
        None => Some(write.insert(writer(side.control(), size)?).clone()),
    };
    if side.is_half() != leg.is_from_half() {
        // This move only brings the VM to where the measured one begins.
        side.move_into(leg.is_from_half(), None).context("bring it to where this begins")?;
    }
    if leg != Leg::Postcopy {
        return side.move_into(leg.into_half(), command.as_deref());
    }
    let moved = side.postcopy(READER)?;
    side.control().command("verify").with_context(|| side.state())?;
    Ok(moved)
}

/// Has VMs go through all legs, a new one after each that failed. A leg is tried so often. `live` boots a VM and leads it.
pub fn all(
    name: &str,
    legs: &[Leg],
    tries: usize,
    cases: &mut Cases,
    mut live: impl FnMut(&[Leg], &mut Cases) -> Result<(), Stopped>,
) {
    let (mut left, mut tried) = (legs, 0);
    while let Err(Stopped { at, error }) = live(left, cases) {
        tried = if at == 0 { tried + 1 } else { 1 };
        left = left.get(at..).unwrap_or_default();
        let Some((leg, rest)) = left.split_first() else { return };
        let name = format!("migrate: {name}, {}", leg.text());
        if tried < tries {
            eprintln!("{name}: failed, and is tried again: {error:#}");
            cases.of_mut(*leg).again();
            continue;
        }
        cases.of_mut(*leg).fail(&name, &error);
        (left, tried) = (rest, 0);
        if left.is_empty() {
            return;
        }
    }
}

impl From<anyhow::Error> for Stopped {
    /// Before its first leg.
    fn from(error: anyhow::Error) -> Stopped {
        Stopped { at: 0, error }
    }
}
