//! The arbiter in words: whether it decides about a move, what it has said, and whether it is there.

use pagoda_api::types::{HostArbiter, MoveArbiter};
use pagoda_move::units::{HostKey, RegisterId};

use super::{Said, Standing};

const GRANT_ALONE: &str = "the grant alone decides";

/// What a move from this host has of it. `register`: what both hosts have agreed on; `is_welcome`: the destination has answered.
pub fn of_source(
    standing: &Standing,
    register: Option<RegisterId>,
    is_welcome: bool,
    is_arbitrated: bool,
    (said, me, peer): (Said, HostKey, &str),
) -> MoveArbiter {
    let says = match register {
        Some(_) => answered(said, is_arbitrated, me, peer),
        None if !is_welcome && standing.register.is_some() => "not agreed on yet".to_owned(),
        None => absent(standing, peer),
    };
    MoveArbiter { decides: is_arbitrated, says }
}

/// What a move to this host has of it.
pub fn of_destination(
    standing: &Standing,
    register: Option<RegisterId>,
    is_arbitrated: bool,
    (said, me, peer): (Said, HostKey, &str),
) -> MoveArbiter {
    let says = match register {
        Some(_) if is_arbitrated => answered(said, true, me, peer),
        Some(_) => "it has not been asked".to_owned(),
        None => absent(standing, peer),
    };
    MoveArbiter { decides: is_arbitrated, says }
}

/// What a move that is not begun would have.
pub fn of_plan(standing: &Standing, is_agreed: bool, peer: &str) -> MoveArbiter {
    let says =
        if is_agreed { "etcd decides if the link is cut at the grant".to_owned() } else { absent(standing, peer) };
    MoveArbiter { decides: is_agreed, says }
}

/// What this host has. None: nothing is configured.
pub fn of_host(standing: &Standing) -> Option<HostArbiter> {
    let says = match (&standing.register, &standing.trouble) {
        (Some(register), _) => format!("etcd, registers {register}"),
        (None, Some(trouble)) => trouble.clone(),
        (None, None) => "not asked yet".to_owned(),
    };
    standing.is_configured.then(|| HostArbiter { reachable: standing.register.is_some(), says })
}

fn answered(said: Said, is_arbitrated: bool, me: HostKey, peer: &str) -> String {
    match said {
        Some(Some(registered)) if registered.owner == me => "etcd names this host".to_owned(),
        Some(Some(_)) => format!("etcd names {peer}"),
        Some(None) if is_arbitrated => "etcd does not answer".to_owned(),
        None if is_arbitrated => "etcd has not answered yet".to_owned(),
        Some(None) | None => format!("etcd has not answered: {GRANT_ALONE}"),
    }
}

fn absent(standing: &Standing, peer: &str) -> String {
    if !standing.is_configured {
        format!("this host has none: {GRANT_ALONE}")
    } else if standing.register.is_none() {
        format!("etcd was not reached: {GRANT_ALONE}")
    } else {
        format!("{peer} does not ask the same one, or the VM's remote tier is handed over: {GRANT_ALONE}")
    }
}

#[cfg(test)]
mod tests {
    use pagoda_move::owner::Registered;
    use pagoda_move::units::Generation;

    use super::*;

    const ME: HostKey = HostKey([1; 32]);

    #[test]
    fn it_is_said_who_decides() {
        let register = RegisterId::of(7);
        let reached = Standing { is_configured: true, register, trouble: None };
        let away = Standing { register: None, trouble: Some("no leader".into()), ..reached.clone() };
        let named = |owner| Some(Some(Registered { generation: Generation(3), owner }));
        let check = |standing: &Standing, agreed, is_welcome, decides, said, expected: &str| {
            let shown = of_source(standing, agreed, is_welcome, decides, (said, ME, "host2"));
            assert!(shown.says.contains(expected) && shown.decides == decides, "{expected}: {shown:?}");
        };
        check(&Standing::default(), None, true, false, None, "this host has none");
        check(&away, None, true, false, None, "was not reached");
        check(&reached, None, false, false, None, "not agreed on yet");
        check(&reached, None, true, false, None, "host2 does not ask the same one");
        check(&reached, register, true, true, named(ME), "names this host");
        check(&reached, register, true, true, named(HostKey([2; 32])), "names host2");
        check(&away, register, true, true, Some(None), "does not answer");
        check(&away, register, true, false, Some(None), GRANT_ALONE);
        assert_eq!(of_host(&Standing::default()), None);
        assert!(of_host(&reached).is_some_and(|host| host.reachable && host.says.contains("0000000000000007")));
        assert!(of_host(&away).is_some_and(|host| !host.reachable && host.says == "no leader"));
        assert!(of_plan(&reached, true, "host2").decides && !of_plan(&reached, false, "host2").decides);
    }
}
