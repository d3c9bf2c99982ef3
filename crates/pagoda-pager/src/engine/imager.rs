//! The VM's newest image, while the VM has to do with it: the owner of its files on the engine's side.
//!
//! The order: prepared, while the VM runs -> asked for, when the VM stands still -> direct I/O is over -> the ticket is claimed
//! -> all pages are write-protected and frozen -> the image's directory gets its name, and the image exists -> each page is
//! copied into it before it changes, or while there is time -> it has all pages, and the VM has no part in it any more. What
//! goes wrong before the image exists refuses it, and no page stays frozen. What goes wrong later loses it: the VM goes on.
//!
//! **When a page may change.** When [`Imager::preserve`] returns, either the image has the page, or it is known for the next
//! daemon that the image is lost. Its files say so. If they take no note, shared memory does, which the VMM keeps
//! ([`Paging::mark_lost_image`]): a daemon that comes next never takes a page that has changed for the image's. The note is
//! tried again until the files have it, and no other image begins before.
//!
//! **An image on a parent.** When an image has all pages, the machine still knows which pages nobody could have changed since it
//! began. The next image may refer to it for these, if it is prepared as its child: [`Imager::whole`] says which image that is.
//! Nobody else can know it, so this is over with this engine, and with whatever the machine is not sure of.
//!
//! **If this engine dies**, the pages that the image lacks are those that the VM holds unchanged, and the next engine goes on
//! ([`Imager::resume`]). If the VM ends first, what is missing is copied from its memory and its tiers before they go.

mod beginning;
mod content;
mod loss;
mod pace;
mod recovery;
mod write_back;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Event, OpId, Pages, Refusal, Source};
use pagoda_core::units::{ChunkIdx, PageCount};
use pagoda_image::{ImageId, Ledger, Loss, Prepared, Writer};
use pagoda_sys::ring::Ring;

use self::beginning::{CLOCK_PAUSE, Open, Verdict, Waiting};
use self::content::{Room, take_over, take_over_all};
use self::loss::Unnoted;
use self::pace::Fills;
use self::recovery::{Found, look};
use self::write_back::{LOOK, Progress, WriteBack};
use super::paging::Paging;
use crate::handle::Notice;
use crate::image::{ImageStage, ImageStatus, Ticket};

pub use self::beginning::refusal_text;
pub use self::pace::Pace;

/// Thousandths of the engine's time for protecting pages, which ends soon: 10 us a chunk.
const PREPARE_PER_MILLE: u32 = 500;
/// The same for copying pages: faults wait behind a step, and a write of a frozen page costs the guest a copy, until all are.
const FILL_PER_MILLE: u32 = 250;
/// How often all pages are protected before the image begins: the second time for what was written during the first.
const SWEEPS: u32 = 2;

#[derive(Debug)]
enum State {
    /// There is no image, or it has all pages.
    Idle,
    Preparing(Prepared),
    /// The VM stands still.
    Waiting(Prepared, Waiting),
    /// The machine has been told to freeze all pages.
    Beginning {
        prepared: Prepared,
        ticket: Open,
        is_protected: bool,
    },
    Filling(Writer),
    Lost(Unnoted),
}

/// What the loop is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    Nothing,
    /// Ask the agent which direct I/O has ended.
    AskClock,
    /// Give the machine `Event::Freeze`, and then call [`Imager::end_beginning`].
    Freeze {
        has_parent: bool,
    },
    /// Give the machine `Event::Prepare`, and then call [`Imager::note_step`].
    Prepare,
    /// Give the machine `Event::Fill`, and then call [`Imager::note_step`].
    Fill,
}

/// Takes the VM's newest image from its preparation until it has all pages or is lost.
#[derive(Debug)]
pub struct Imager {
    /// The VM's name, for messages.
    vm: Arc<str>,
    state: State,
    room: Room,
    pace: Pace,
    fills: Fills,
    /// While the image is filled, if there is a thread for it.
    write_back: Option<WriteBack>,
    /// A later image may refer to one that begins now.
    follows: bool,
    whole: Option<ImageId>,
}

impl Imager {
    /// The imager of a VM that has no image.
    pub fn new(vm: Arc<str>) -> Imager {
        let (pace, fills) = (Pace::new(PREPARE_PER_MILLE), Fills::new(FILL_PER_MILLE));
        let (state, room) = (State::Idle, Room::default());
        Imager { vm, state, room, pace, fills, write_back: None, follows: false, whole: None }
    }

    /// Whether a later image may refer to the newest one. If it may, the VM stays armed, and its first writes behind an image
    /// are seen.
    pub fn follow(&mut self, on: bool, paging: &mut Paging) {
        self.follows = on;
        if !on && self.whole.take().is_some() {
            paging.push(Event::Forget);
        }
    }

    /// The newest image, which has all pages, if the machine knows which pages are still what it has.
    pub fn whole(&self) -> Option<ImageId> {
        self.whole
    }

    /// There is nothing to do.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle)
    }

    /// How far the image is.
    pub fn status(&self, paging: &Paging) -> Option<ImageStatus> {
        let (id, stage) = match &self.state {
            State::Idle => return None,
            State::Preparing(prepared) | State::Waiting(prepared, _) | State::Beginning { prepared, .. } => {
                (prepared.ledger().id(), ImageStage::Preparing { sweeps: paging.machine().sweeps() })
            }
            State::Filling(writer) => {
                (writer.ledger().id(), ImageStage::Filling { missing: PageCount(writer.missing()) })
            }
            State::Lost(unnoted) => (unnoted.id(), ImageStage::Lost),
        };
        Some(ImageStatus { id, stage })
    }

    /// Pages of a chunk that the image has no copy of.
    pub fn missing_of(&self, chunk: ChunkIdx) -> PageSet {
        match &self.state {
            State::Filling(writer) => writer.missing_of(chunk),
            _ => PageSet::EMPTY,
        }
    }

    /// An image is to begin soon.
    pub fn prepare(&mut self, prepared: Prepared, paging: &mut Paging) {
        let why = match &self.state {
            State::Filling(_) | State::Beginning { .. } => Some("another one is not filled yet"),
            State::Lost(_) => Some("another one is lost, and that could not be noted yet"),
            _ if prepared.ledger().pages() != paging.space().chunks().pages() => Some("it is of another size"),
            _ => None,
        };
        if let Some(why) = why {
            return tracing::error!(vm = %self.vm, image = %prepared.ledger().id(), "no image is prepared: {why}");
        }
        if let State::Waiting(_, waiting) = &self.state {
            waiting.ticket.refuse("another image was prepared");
        }
        // Its sweeps are not those of one that was prepared before.
        self.end_preparation(paging);
        self.room.make();
        self.state = State::Preparing(prepared);
        paging.push(Event::Prepare { on: true });
    }

    /// No image is to begin.
    pub fn cancel(&mut self, paging: &mut Paging) {
        if let State::Waiting(_, waiting) = &self.state {
            waiting.ticket.refuse("it was cancelled");
        }
        self.end_preparation(paging);
    }

    fn end_preparation(&mut self, paging: &mut Paging) {
        if let State::Preparing(_) | State::Waiting(..) | State::Beginning { .. } = self.state {
            self.state = State::Idle;
            self.room.drop();
            paging.push(Event::Prepare { on: false });
        }
    }

    /// The VM stands still, and the image is to begin.
    pub fn ask_to_begin(&mut self, ticket: Arc<Ticket>) {
        let ticket = Open::new(ticket);
        self.state = match std::mem::replace(&mut self.state, State::Idle) {
            State::Preparing(prepared) => State::Waiting(prepared, Waiting::new(ticket)),
            other => {
                ticket.refuse("no image is prepared");
                other
            }
        };
    }

    /// This image is about to be removed. It is lost first: if neither this engine nor the removal lives to see it, the next
    /// engine must not go on with it.
    pub fn remove(&mut self, id: ImageId, paging: &mut Paging) {
        if self.whole == Some(id) {
            self.whole = None;
            paging.push(Event::Forget);
        }
        match &mut self.state {
            State::Filling(writer) if writer.ledger().id() == id => {
                let _ = self.lose("it was removed", paging);
            }
            State::Preparing(prepared) | State::Waiting(prepared, _) if prepared.ledger().id() == id => {
                self.cancel(paging);
            }
            _ => {}
        }
    }

    /// What is to be done next, if anything is due.
    pub fn turn(&mut self, paging: &mut Paging) -> Turn {
        let (now, faults, is_behind) = (Instant::now(), paging.has_page_faults(), self.is_behind());
        match &mut self.state {
            State::Waiting(_, waiting) => match waiting.look(paging) {
                Verdict::Wait => Turn::Nothing,
                Verdict::AskClock => Turn::AskClock,
                Verdict::Over => {
                    self.end_preparation(paging);
                    Turn::Nothing
                }
                Verdict::Claimed => {
                    let mut has_parent = false;
                    if let State::Waiting(prepared, waiting) = std::mem::replace(&mut self.state, State::Idle) {
                        let parent = prepared.ledger().parent();
                        has_parent = parent.is_some() && parent == self.whole;
                        self.state = State::Beginning { prepared, ticket: waiting.ticket, is_protected: true };
                    }
                    Turn::Freeze { has_parent }
                }
            },
            State::Preparing(_) if protects(paging) && self.pace.is_due(faults, now) => Turn::Prepare,
            State::Filling(_) if fills(paging) && !is_behind && self.fills.is_due(faults, now) => Turn::Fill,
            _ => Turn::Nothing,
        }
    }

    /// How long the loop may wait before [`Imager::turn`].
    pub fn wait(&self, paging: &Paging) -> Duration {
        if self.is_idle() {
            return Duration::MAX;
        }
        let (now, faults) = (Instant::now(), paging.has_page_faults());
        match &self.state {
            State::Waiting(..) => CLOCK_PAUSE,
            State::Preparing(_) if protects(paging) => self.pace.wait(faults, now),
            State::Filling(writer) if writer.missing() == 0 || self.is_behind() => LOOK,
            State::Filling(_) if fills(paging) => self.fills.wait(faults, now),
            _ => Duration::MAX,
        }
    }

    /// The step that [`Imager::turn`] asked for is done.
    pub fn note_step(&mut self, turn: Turn, begun: Instant, paging: &Paging) {
        match turn {
            Turn::Fill => self.fills.note_step(begun, paging.machine().is_fill_blocked()),
            _ => self.pace.note_step(begun),
        }
    }

    /// Pages could not be write-protected.
    pub fn note_unprotected(&mut self) {
        if let State::Beginning { is_protected, .. } = &mut self.state {
            *is_protected = false;
        }
    }

    /// Executes `BeginImage`: all pages are frozen, and protected unless that has failed.
    pub fn begin(&mut self, paging: &mut Paging) {
        let begun = match std::mem::replace(&mut self.state, State::Idle) {
            State::Beginning { prepared, ticket, is_protected } => commit(prepared, &ticket, is_protected, paging),
            other => {
                self.state = other;
                return paging.push_correction(Event::Thaw);
            }
        };
        // What the machine knows from now on is of this image.
        self.whole = None;
        match begun {
            Some(writer) => self.fill(writer),
            None => {
                self.room.drop();
                paging.push_correction(Event::Thaw);
            }
        }
    }

    fn fill(&mut self, writer: Writer) {
        self.write_back = WriteBack::start(writer.ledger(), &self.vm);
        self.state = State::Filling(writer);
    }

    /// The disk takes less than filling gives it. Without a thread that looks after it, the kernel slows filling down.
    fn is_behind(&self) -> bool {
        let State::Filling(writer) = &self.state else { return false };
        self.write_back.is_some() && writer.is_behind()
    }

    /// Executes `RefuseImage`: the daemon is told why no image begins.
    pub fn refuse(&mut self, why: Refusal, paging: &mut Paging) {
        self.refuse_beginning(refusal_text(why), paging);
    }

    /// The machine has done what follows from `Event::Freeze`. If it was halted in the middle of that, there is no image.
    pub fn end_beginning(&mut self, paging: &mut Paging) {
        self.refuse_beginning("the VM is halted", paging);
    }

    fn refuse_beginning(&mut self, why: &str, paging: &mut Paging) {
        if let State::Beginning { ticket, .. } = &self.state {
            ticket.refuse(why);
            self.end_preparation(paging);
        }
    }

    /// Executes `Preserve`. See the module. What is returned is to be reported: the image is lost.
    #[must_use]
    pub fn preserve(&mut self, pages: Pages, from: Source, paging: &mut Paging, ring: &Ring) -> Option<Notice> {
        let State::Filling(writer) = &mut self.state else { return None };
        let why = take_over(writer, &mut self.room, (pages, from), paging, ring).err()?;
        self.lose(&why, paging)
    }

    /// A read for an image begins: `Keep`.
    pub fn begin_read(&mut self, op: OpId) {
        self.fills.begin_read(op);
    }

    /// The buffer of a read is free.
    pub fn end_read(&mut self, op: OpId) {
        self.fills.end_read(op);
    }

    /// Gives the image up; if its writer has done so already, for the writer's reason. What is returned is to be reported.
    #[must_use]
    pub fn lose(&mut self, why: &str, paging: &mut Paging) -> Option<Notice> {
        let State::Filling(writer) = &mut self.state else { return None };
        writer.lose(why);
        let Loss { why, is_noted } = writer.lost()?.clone();
        let ledger = Arc::clone(writer.ledger());
        paging.push_correction(Event::Thaw);
        Some(self.set_lost(ledger, why, is_noted, paging))
    }

    fn set_lost(&mut self, ledger: Arc<Ledger>, why: String, is_noted: bool, paging: &Paging) -> Notice {
        let (id, text) = (ledger.id(), why.clone());
        self.room.drop();
        self.write_back = None;
        self.state = match is_noted {
            true => State::Idle,
            false => {
                paging.mark_lost_image(id);
                tracing::error!(vm = %self.vm, image = %id, "the image is lost, and its files take no note of that");
                State::Lost(Unnoted::new(ledger, why))
            }
        };
        Notice::ImageLost(id, text)
    }

    /// Once in a turn of the loop, when no event waits: notes a loss that could not be noted, and says that the image has all
    /// pages. What is returned is to be reported.
    #[must_use]
    pub fn settle(&mut self, paging: &mut Paging) -> Option<Notice> {
        match &mut self.state {
            State::Lost(unnoted) => {
                if unnoted.retry() {
                    paging.unmark_lost_image();
                    self.state = State::Idle;
                }
                None
            }
            State::Filling(writer) if !paging.is_halted() && paging.machine().frozen() != writer.missing() => {
                self.lose("the page table and the image differ in what it lacks; please report this", paging)
            }
            State::Filling(writer) => {
                let is_full = writer.missing() == 0;
                match self.write_back.as_ref().map_or(Progress::Ended, WriteBack::progress) {
                    Progress::Failed(why) => self.lose(&why, paging),
                    Progress::Ended if is_full => self.set_filled(paging),
                    Progress::Works if is_full => {
                        // Whoever syncs the rest would not hear of its errors.
                        self.write_back.as_ref().map(WriteBack::end);
                        None
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn set_filled(&mut self, paging: &mut Paging) -> Option<Notice> {
        let State::Filling(writer) = std::mem::replace(&mut self.state, State::Idle) else { return None };
        self.room.drop();
        self.write_back = None;
        let id = writer.ledger().id();
        self.whole = self.follows.then_some(id);
        if !self.follows {
            paging.push(Event::Forget);
        }
        Some(Notice::ImageFilled(id))
    }

    /// Goes on with an image that a daemon before this one began. The VM is not served yet. `taken_over`: it ran before. What is
    /// returned is to be reported.
    #[must_use]
    pub fn resume(&mut self, ledger: Arc<Ledger>, taken_over: bool, paging: &Paging) -> Option<Notice> {
        match look(&ledger, taken_over, paging) {
            Found::Unfilled(writer) => {
                tracing::info!(vm = %self.vm, image = %ledger.id(), missing = writer.missing(), "goes on with an image");
                self.room.make();
                self.fill(writer);
                None
            }
            Found::Filled => Some(Notice::ImageFilled(ledger.id())),
            Found::LostBefore(why) => Some(Notice::ImageLost(ledger.id(), why)),
            Found::Lost(why) => {
                let is_noted = ledger.lose(&why);
                if is_noted && paging.lost_image() == Some(ledger.id()) {
                    paging.unmark_lost_image();
                }
                Some(self.set_lost(ledger, why, is_noted, paging))
            }
        }
    }

    /// The VM has ended: what its image lacks is copied, or the image is lost. What is returned is to be reported.
    #[must_use]
    pub fn end(&mut self, paging: &mut Paging) -> Option<Notice> {
        let State::Filling(writer) = &mut self.state else { return None };
        // Before the rest comes at once: what is synced then is a piece.
        self.write_back.as_ref().map(WriteBack::end);
        let taken = take_over_all(writer, &mut self.room, paging);
        match taken.and_then(|()| self.write_back.as_ref().map_or(Ok(()), WriteBack::wait_ended)) {
            Ok(()) => self.set_filled(paging),
            Err(why) => self.lose(&why, paging),
        }
    }
}

/// Makes the image exist, and answers.
fn commit(prepared: Prepared, ticket: &Open, is_protected: bool, paging: &Paging) -> Option<Writer> {
    // Looked at again now that all pages are protected: direct I/O that began before its page was protected goes through, and
    // what begins from now on meets a protected page. A punch empties a page whatever its protection.
    let is_quiet = !paging.has_direct_io() && !paging.is_punching();
    let begun = match (is_protected, is_quiet) {
        (true, true) => prepared.commit().map_err(|error| format!("its files could not be made an image: {error}")),
        (false, _) => Err("the VM's memory could not be write-protected".to_owned()),
        (true, false) => Err("its VMM began direct I/O, or gave memory back, while it stood still".to_owned()),
    };
    match begun {
        Ok(writer) => {
            ticket.say_begun();
            Some(writer)
        }
        Err(why) => {
            ticket.refuse(&why);
            None
        }
    }
}

/// Pages are still to be protected before the image begins.
fn protects(paging: &Paging) -> bool {
    !paging.is_halted()
        && paging.machine().is_armed()
        && (paging.machine().sweeps() < SWEEPS || paging.machine().borrowed_chunks() > 0)
}

/// Pages are still to be copied, and can be.
fn fills(paging: &Paging) -> bool {
    !paging.is_halted() && paging.machine().has_pages_to_fill()
}
