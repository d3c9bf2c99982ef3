//! What the simulator does not do: operators, a source that is told late of its arbiter, notes that cannot be written.

use std::time::Duration;

use pagoda_move::note::{Decision, Note, Offered, Owned};
use pagoda_move::owner::{
    Action, Answer, Claim, Destination, DestinationEvent, End, NO_ARBITER_AFTER, Qemu, RETRY_EVERY, Recovered,
    Registered, Source, SourceEvent, Step, TAKE_BACK_AFTER, answer, recover, settled_by,
};
use pagoda_move::units::{AttemptId, ConnectionNo, Generation, HostKey, Moment, RegisterId};
use pagoda_move::wire::Control;
use pagoda_move::wire::control::{DecidedBy, Holding, Verdict};
use pagoda_move::wire::offer::{Capabilities, Hello};

const HOME: HostKey = HostKey([1; 32]);
const AWAY: HostKey = HostKey([2; 32]);
const ATTEMPT: AttemptId = AttemptId(7);
const OWN: Generation = Generation(4);
const OFFERED: Generation = Generation(5);
const BACK: Generation = Generation(6);
const MINE: Registered = Registered { generation: OWN, owner: HOME };

fn offered(peer: HostKey) -> Offered {
    Offered { attempt: ATTEMPT, peer, generation: OFFERED, register: None }
}

fn register() -> RegisterId {
    RegisterId::of(9).expect("it is not 0")
}

/// The same, where both hosts ask an arbiter.
fn arbitrated(peer: HostKey) -> Offered {
    Offered { register: Some(register()), ..offered(peer) }
}

fn claim(step: Step) -> Action {
    let (register, attempt) = (register(), ATTEMPT);
    Action::Ask(Claim { register, attempt, source: HOME, destination: AWAY, offered: OFFERED, step })
}

/// A machine, its time, and what it wanted last.
struct Rig<M> {
    machine: M,
    now: Moment,
    actions: Vec<Action>,
}

impl<M> Rig<M> {
    fn wants(&self, action: &Action) -> bool {
        self.actions.contains(action)
    }

    fn sends(&self, message: Control) -> bool {
        self.wants(&Action::Send(message))
    }
}

impl Rig<Source> {
    fn take(&mut self, event: SourceEvent<'_>) -> &mut Self {
        self.actions.clear();
        self.machine.apply(self.now, event, &mut self.actions);
        self
    }

    fn after(&mut self, span: Duration) -> &mut Self {
        self.now = self.now + span;
        self.take(SourceEvent::Tick)
    }

    /// All is at the destination, and the note that gives the VM away is being written.
    fn noting(arbiter: bool) -> Rig<Source> {
        let machine = Source::begin(HOME, OWN, offered(AWAY), Moment::default());
        let mut rig = Rig { machine, now: Moment::default(), actions: Vec::new() };
        if arbiter {
            assert!(rig.take(SourceEvent::Agreed(register())).wants(&claim(Step::Begin)));
            rig.take(SourceEvent::Arbiter(Some(MINE)));
        }
        rig.take(SourceEvent::Switch);
        assert!(rig.wants(&Action::Stop));
        rig.take(SourceEvent::Stopped).take(SourceEvent::Complete);
        rig.take(SourceEvent::Message(&Control::Holds { attempt: ATTEMPT, holding: Holding::Ready }));
        rig
    }

    fn granted(arbiter: bool) -> Rig<Source> {
        let mut rig = Rig::noting(arbiter);
        let decision = if arbiter { Decision::Arbiter } else { Decision::Grant };
        let offered = if arbiter { arbitrated(AWAY) } else { offered(AWAY) };
        assert!(rig.wants(&Action::Write(Some(Note::Given(offered, decision)))));
        rig.take(SourceEvent::Written(true));
        assert!(rig.sends(grant(decision.on_the_wire())));
        rig
    }
}

impl Rig<Destination> {
    fn take(&mut self, event: DestinationEvent<'_>) -> &mut Self {
        self.actions.clear();
        self.machine.apply(self.now, event, &mut self.actions);
        self
    }

    fn ready(arbiter: bool) -> Rig<Destination> {
        let mut actions = Vec::new();
        let offered = if arbiter { arbitrated(HOME) } else { offered(HOME) };
        let machine = Destination::begin(AWAY, offered, None, Moment::default(), &mut actions);
        let mut rig = Rig { machine, now: Moment::default(), actions };
        rig.take(DestinationEvent::Written(true));
        assert!(rig.wants(&Action::Prepare));
        rig.take(DestinationEvent::Prepared).take(DestinationEvent::Loaded);
        rig
    }
}

fn grant(by: DecidedBy) -> Control {
    Control::Grant { attempt: ATTEMPT, generation: OFFERED, by }
}

fn settled(generation: Generation, verdict: Verdict) -> Control {
    Control::Settled { attempt: ATTEMPT, generation, verdict }
}

const STARTED: Control = Control::Started { attempt: ATTEMPT, generation: OFFERED };
const WHOLE: Control = Control::Whole { attempt: ATTEMPT };
const REFUSAL: Control = Control::Refusal { attempt: ATTEMPT, generation: OFFERED };

#[test]
fn an_operator_gives_a_vm_back_to_its_source_and_a_destination_that_returns_ends_its_own() {
    let mut source = Rig::granted(false);
    source.after(Duration::from_secs(3600));
    assert!(!source.wants(&Action::Run));
    source.take(SourceEvent::Resolve);
    assert!(source.wants(&Action::Run) && source.wants(&Action::Write(Some(Note::Owned(Owned::Back(offered(AWAY)))))));
    source.take(SourceEvent::Written(true));
    assert!(source.wants(&Action::End(End::CameBack)));

    let mut destination = Rig::ready(false);
    destination.take(DestinationEvent::Message(&grant(DecidedBy::Grant))).take(DestinationEvent::Written(true));
    assert!(destination.wants(&Action::Run) && destination.sends(STARTED));
    let Answer::Send(said) = answer(Some(Note::Owned(Owned::Back(offered(AWAY)))), AWAY, &STARTED) else {
        panic!("nothing is said")
    };
    assert_eq!(said, settled(BACK, Verdict::Mine));
    destination.take(DestinationEvent::Message(&said));
    assert_eq!(destination.actions, [Action::Discard, Action::Write(None)]);
    assert!(destination.take(DestinationEvent::Written(true)).wants(&Action::End(End::Superseded)));
}

#[test]
fn a_vm_whose_qemu_had_ended_before_it_was_let_run_goes_back() {
    let mut destination = Rig::ready(false);
    destination.take(DestinationEvent::Message(&grant(DecidedBy::Grant))).take(DestinationEvent::Written(true));
    assert!(destination.wants(&Action::Run));
    assert!(destination.take(DestinationEvent::NeverRan).wants(&Action::Write(Some(Note::Refused(offered(HOME))))));
    assert!(destination.take(DestinationEvent::Written(true)).wants(&Action::Discard));
    assert!(destination.wants(&Action::Send(REFUSAL)));
    // While the note that accepts it is on its way: the same.
    let mut destination = Rig::ready(false);
    destination.take(DestinationEvent::Message(&grant(DecidedBy::Grant))).take(DestinationEvent::QemuDied);
    destination.take(DestinationEvent::Written(true));
    assert!(!destination.wants(&Action::Run) && destination.wants(&Action::Write(Some(Note::Refused(offered(HOME))))));
}

#[test]
fn an_operator_lets_a_destination_that_has_all_take_over() {
    let mut destination = Rig::ready(false);
    destination.take(DestinationEvent::Resolve);
    assert_eq!(destination.actions, [Action::Write(Some(Note::Accepted(offered(HOME), DecidedBy::Grant)))]);
    assert!(destination.take(DestinationEvent::Written(true)).wants(&Action::Run));
    let mut source = Rig::noting(false);
    source.take(SourceEvent::Message(&STARTED));
    // Its note is on its way already. Nothing lets the VM run here any more.
    source.take(SourceEvent::Written(false)).take(SourceEvent::Cancel).after(Duration::from_secs(10));
    assert_eq!(source.actions, [Action::Write(Some(Note::Given(offered(AWAY), Decision::Grant)))]);
    source.take(SourceEvent::Written(true)).take(SourceEvent::Message(&STARTED));
    assert!(source.machine.serves() && !source.wants(&Action::Discard), "it may need pages");
    assert!(source.take(SourceEvent::Message(&WHOLE)).wants(&Action::Discard));
    assert!(source.take(SourceEvent::Written(true)).wants(&Action::End(End::Superseded)));
    // Its source had all the pages that it lacks, and may run it: it does not hear that all is here.
    assert!(destination.take(DestinationEvent::Resolve).wants(&Action::Discard));
    destination.take(DestinationEvent::QemuDied);
    assert!(!destination.wants(&Action::Send(WHOLE)) && destination.wants(&Action::Send(STARTED)));
    destination.take(DestinationEvent::Resolve).take(DestinationEvent::Written(true));
    assert!(destination.wants(&Action::End(End::Lost)));
}

#[test]
fn a_source_that_comes_back_with_a_vm_that_an_operator_took_over_gives_it_away_and_ends_it() {
    let note = Some(Note::Owned(Owned::Offered(offered(AWAY))));
    // As long as the destination lacks pages it is of no use.
    assert_eq!(answer(note, AWAY, &STARTED), Answer::Nothing);
    assert_eq!(answer(note, AWAY, &WHOLE), Answer::Superseded(offered(AWAY)));

    let superseded = || {
        let machine = Source::supersede(HOME, offered(AWAY), Moment::default());
        Rig { machine, now: Moment::default(), actions: Vec::new() }
    };
    let mut source = superseded();
    source.take(SourceEvent::LinkUp);
    assert!(source.sends(grant(DecidedBy::Grant)) && !source.wants(&Action::Run));
    source.take(SourceEvent::Message(&STARTED));
    assert!(!source.wants(&Action::Discard));
    source.take(SourceEvent::Message(&WHOLE));
    assert_eq!(source.actions, [Action::Discard, Action::Write(None)]);
    source.take(SourceEvent::Written(true));
    assert!(source.sends(settled(OFFERED, Verdict::Yours)) && source.wants(&Action::End(End::Superseded)));
    // It was not true after all.
    let mut source = superseded();
    source.take(SourceEvent::LinkUp).take(SourceEvent::Message(&REFUSAL));
    assert!(source.wants(&Action::Run) && source.wants(&Action::Write(Some(Note::Owned(Owned::Back(offered(AWAY)))))));
}

/// Whatever a host says of other attempts, at whatever generation: neither its VM nor the one here ends by it.
#[test]
fn nobody_ends_a_vm_of_which_the_note_does_not_tell() {
    const THIRD: HostKey = HostKey([3; 32]);
    let other = |peer| Offered { attempt: AttemptId(8), ..offered(peer) };
    let owned = [
        Owned::Alone(OWN),
        Owned::Alone(OFFERED),
        Owned::Alone(BACK),
        Owned::Came(offered(THIRD)),
        Owned::Came(other(AWAY)),
        Owned::Offered(offered(THIRD)),
        Owned::Offered(other(AWAY)),
        Owned::Back(offered(THIRD)),
        Owned::Back(other(AWAY)),
    ];
    let generations = [0, 1, 4, 5, 6, 7, 1 << 40].map(Generation);
    for own in owned {
        let note = Some(Note::Owned(own));
        assert_eq!(answer(note, AWAY, &WHOLE), Answer::Nothing, "{own:?}");
        for generation in generations {
            let started = Control::Started { attempt: ATTEMPT, generation };
            assert_eq!(answer(note, AWAY, &started), Answer::Unknown, "{own:?}");
            let grant = Control::Grant { attempt: ATTEMPT, generation, by: DecidedBy::Grant };
            let withdraw = Control::Withdraw { attempt: ATTEMPT, generation };
            for message in [grant, withdraw] {
                let expected = match own.generation() < generation {
                    true => Answer::Refuse(Offered { generation, ..offered(AWAY) }, DecidedBy::Grant),
                    false => Answer::Unknown,
                };
                assert_eq!(answer(note, AWAY, &message), expected, "{own:?} {message:?}");
            }
        }
        // One that has not run it gives up; one that runs it by now does not end it.
        let holds = Control::Holds { attempt: ATTEMPT, holding: Holding::Ready };
        for message in [&holds, &REFUSAL] {
            let expected = Answer::Send(settled(Generation(0), Verdict::Mine));
            assert_eq!(answer(note, AWAY, message), expected, "{own:?}");
        }
    }
    for generation in generations.into_iter().filter(|generation| *generation != BACK) {
        let mut destination = Rig::ready(false);
        destination.take(DestinationEvent::Message(&grant(DecidedBy::Grant))).take(DestinationEvent::Written(true));
        destination.take(DestinationEvent::Message(&settled(generation, Verdict::Mine)));
        assert!(!destination.wants(&Action::Discard), "{generation:?}");
    }
    // The note of a move that has not ended is for whoever goes on with it.
    let given = Some(Note::Given(offered(AWAY), Decision::Grant));
    let holds = Control::Holds { attempt: ATTEMPT, holding: Holding::Ready };
    for message in [&STARTED, &WHOLE, &REFUSAL, &holds] {
        assert_eq!(answer(given, AWAY, message), Answer::Nothing, "{message:?}");
    }
}

/// A source may have ended the VM that it speaks of, and begin to move another one of its name.
#[test]
fn a_hello_of_another_vm_ends_none_that_runs() {
    let hello = |generation| Hello {
        attempt: AttemptId(9),
        connection: ConnectionNo(1),
        generation,
        protocol_min: 1,
        protocol_max: 1,
        capabilities: Capabilities::default(),
        required: Capabilities::default(),
        unix_s: 0,
        register: None,
        software: String::new(),
        vm: "web1".into(),
        qemu: String::new(),
        machine: String::new(),
        cpu_features: String::new(),
        regions: Vec::new(),
    };
    for generation in [OWN, OFFERED, BACK, Generation(50)] {
        let said = settled_by(&hello(generation), offered(HOME)).expect("it is another attempt");
        let mut destination = Rig::ready(false);
        destination.take(DestinationEvent::Message(&grant(DecidedBy::Grant))).take(DestinationEvent::Written(true));
        assert!(!destination.take(DestinationEvent::Message(&said)).wants(&Action::Discard), "{generation:?}");
        let mut destination = Rig::ready(false);
        assert!(destination.take(DestinationEvent::Message(&said)).wants(&Action::Discard), "it has not run");
    }
}

#[test]
fn a_grant_that_needs_no_arbiter_takes_the_place_of_one_that_does() {
    let mut destination = Rig::ready(true);
    destination.take(DestinationEvent::Message(&grant(DecidedBy::Arbiter))).take(DestinationEvent::Written(true));
    assert_eq!(destination.actions, [claim(Step::Run)]);
    destination.now = Moment(NO_ARBITER_AFTER);
    destination.take(DestinationEvent::Arbiter(None));
    let asks = Control::NoArbiter { attempt: ATTEMPT, generation: OFFERED };
    assert!(destination.sends(asks.clone()));

    let mut source = Rig::granted(true);
    source.take(SourceEvent::Message(&asks));
    assert!(source.wants(&Action::Write(Some(Note::Given(arbitrated(AWAY), Decision::Grant)))));
    assert!(!source.sends(grant(DecidedBy::Grant)), "before its note is durable");
    source.take(SourceEvent::Written(true)).after(RETRY_EVERY);
    assert!(source.sends(grant(DecidedBy::Grant)));
    source.after(TAKE_BACK_AFTER * 10);
    assert!(!source.actions.iter().any(|action| matches!(action, Action::Ask(_))));
    destination.take(DestinationEvent::Message(&grant(DecidedBy::Grant)));
    assert!(destination.wants(&Action::Run));
}

#[test]
fn a_source_that_has_asked_for_the_vm_never_gives_such_a_grant_not_even_after_a_restart() {
    let mut source = Rig::granted(true);
    source.after(TAKE_BACK_AFTER);
    let note = Note::Given(arbitrated(AWAY), Decision::TakingBack);
    assert_eq!(source.actions[0], Action::Write(Some(note)));
    assert!(!source.actions.iter().any(|action| matches!(action, Action::Ask(_))), "before its note is durable");
    source.take(SourceEvent::Written(true));
    assert!(source.wants(&claim(Step::TakeBack)));
    let asks = Control::NoArbiter { attempt: ATTEMPT, generation: OFFERED };
    assert!(!source.take(SourceEvent::Message(&asks)).actions.iter().any(|action| matches!(action, Action::Write(_))));

    let mut actions = Vec::new();
    let recovered = recover(HOME, Some(note), Qemu::Stopped, source.now, &mut actions);
    let Recovered::Source(machine) = recovered else { panic!("{recovered:?}") };
    let mut source = Rig { machine: *machine, now: source.now, actions };
    source.take(SourceEvent::LinkUp).take(SourceEvent::Message(&asks));
    assert!(!source.actions.iter().any(|action| matches!(action, Action::Write(_))));
    // The question of its earlier life may have had an effect, or this one has.
    source.take(SourceEvent::Arbiter(Some(Registered { generation: BACK, owner: HOME })));
    assert!(source.wants(&Action::Run));
}

#[test]
fn a_note_that_cannot_be_written_is_taken_back_or_refused() {
    let mut source = Rig::noting(false);
    source.take(SourceEvent::Written(false));
    assert!(
        source.wants(&Action::Write(Some(Note::Owned(Owned::Offered(offered(AWAY)))))) && !source.wants(&Action::Run)
    );
    assert!(source.sends(Control::Withdraw { attempt: ATTEMPT, generation: OFFERED }));
    source.take(SourceEvent::Written(false));
    assert!(!source.wants(&Action::Run), "the note may be there");
    source.after(RETRY_EVERY);
    assert!(source.wants(&Action::Write(Some(Note::Owned(Owned::Offered(offered(AWAY)))))));
    source.take(SourceEvent::Message(&REFUSAL));
    assert!(source.wants(&Action::Run), "the other has refused for good");

    let mut source = Rig::noting(false);
    source.take(SourceEvent::Written(false)).take(SourceEvent::Written(true));
    assert_eq!(source.actions[0], Action::Run);
    assert!(source.sends(settled(OWN, Verdict::Mine)) && source.wants(&Action::End(End::GivenUp)));
}

#[test]
fn a_destination_that_cannot_write_refuses_when_it_can() {
    let mut destination = Rig::ready(false);
    destination.take(DestinationEvent::Message(&grant(DecidedBy::Grant))).take(DestinationEvent::Written(false));
    assert_eq!(destination.actions, [Action::Write(Some(Note::Refused(offered(HOME))))]);
    destination.take(DestinationEvent::Written(false));
    assert!(!destination.sends(REFUSAL) && !destination.wants(&Action::Discard));
    destination.now = Moment(RETRY_EVERY);
    destination.take(DestinationEvent::Tick).take(DestinationEvent::Written(true));
    assert_eq!(destination.actions[..2], [Action::Discard, Action::Send(REFUSAL)]);
    // A daemon that starts says so again.
    let mut actions = Vec::new();
    let note = Some(Note::Refused(offered(HOME)));
    let Recovered::Destination(machine) = recover(AWAY, note, Qemu::Stopped, destination.now, &mut actions) else {
        panic!("nobody goes on")
    };
    let mut again = Rig { machine: *machine, now: destination.now, actions };
    assert!(again.wants(&Action::Discard) && again.take(DestinationEvent::LinkUp).sends(REFUSAL));
    again.take(DestinationEvent::Message(&settled(BACK, Verdict::Mine))).take(DestinationEvent::Written(true));
    assert!(again.machine.is_over());
}

#[test]
fn messages_about_unknown_attempts_are_answered_by_the_note() {
    let check = |note, message: &Control, expected| assert_eq!(answer(note, AWAY, message), expected, "{note:?}");
    let refuse = |by| Answer::Refuse(offered(AWAY), by);
    check(None, &grant(DecidedBy::Arbiter), refuse(DecidedBy::Arbiter));
    let withdraw = Control::Withdraw { attempt: ATTEMPT, generation: OFFERED };
    check(None, &withdraw, refuse(DecidedBy::Grant));
    check(Some(Note::Owned(Owned::Came(offered(AWAY)))), &grant(DecidedBy::Grant), Answer::Send(STARTED));
    check(Some(Note::Owned(Owned::Came(offered(AWAY)))), &withdraw, Answer::Send(STARTED));
    let holds = Control::Holds { attempt: ATTEMPT, holding: Holding::Ready };
    check(Some(Note::Owned(Owned::Offered(offered(AWAY)))), &holds, Answer::Send(settled(OWN, Verdict::Mine)));
    check(None, &STARTED, Answer::Send(settled(OFFERED, Verdict::Yours)));
    check(None, &REFUSAL, Answer::Send(settled(Generation(0), Verdict::Mine)));
    check(None, &Control::Reserved { attempt: ATTEMPT }, Answer::Nothing);
    let resume = Control::Resume { attempt: ATTEMPT, connection: Default::default() };
    check(None, &resume, Answer::Send(Control::Forgotten { attempt: ATTEMPT }));
}
