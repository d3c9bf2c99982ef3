use proptest::prelude::*;

use super::*;

fn offer() -> Offer {
    Offer { name: "disk".to_owned(), size: 1 << 30, read_only: false }
}

fn option(number: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&number.to_be_bytes());
    bytes.extend_from_slice(&(content.len() as u32).to_be_bytes());
    bytes.extend_from_slice(content);
    bytes
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

fn go(name: &str, infos: &[u16]) -> Vec<u8> {
    let kinds: Vec<u8> = infos.iter().flat_map(|kind| kind.to_be_bytes()).collect();
    [text(name), (infos.len() as u16).to_be_bytes().to_vec(), kinds].concat()
}

fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let queries_bytes: Vec<u8> = queries.iter().flat_map(|query| text(query)).collect();
    [text(name), (queries.len() as u32).to_be_bytes().to_vec(), queries_bytes].concat()
}

/// A client that has said its flags.
fn greeted() -> Negotiation {
    let mut negotiation = Negotiation::default();
    assert_eq!(negotiation.advance(&offer(), &3_u32.to_be_bytes(), &mut Vec::new()), Progress::Used(4));
    negotiation
}

/// Kinds of the replies in `out`.
fn kinds(mut out: &[u8]) -> Vec<u32> {
    let mut kinds = Vec::new();
    while !out.is_empty() {
        let mut reader = Reader(out);
        assert_eq!(reader.u64(), Some(OPTION_REPLY_MAGIC));
        reader.u32().unwrap();
        kinds.push(reader.u32().unwrap());
        reader.text().unwrap();
        out = reader.0;
    }
    kinds
}

/// Clients learn before the first request that they may not write.
#[test]
fn what_is_read_only_says_so() {
    let offer = Offer { read_only: true, ..offer() };
    let asked = [(option::GO, go("disk", &[])), (option::EXPORT_NAME, b"disk".to_vec())];
    for ((number, content), at) in asked.into_iter().zip([30, 8]) {
        let mut out = Vec::new();
        let progress = greeted().advance(&offer, &option(number, &content), &mut out);
        assert!(matches!(progress, Progress::Agreed(..)));
        let flags = u16::from_be_bytes([out[at], out[at + 1]]);
        assert_eq!(flags, READ_ONLY_FLAGS);
        assert_ne!(flags & crate::wire::export_flag::READ_ONLY, 0);
    }
}

/// That an answer is not to be fragmented can be asked only where it could be.
#[test]
fn only_structured_answers_have_the_flag_against_fragments() {
    use crate::wire::export_flag::SEND_DF;
    for read_only in [false, true] {
        let offer = Offer { read_only, ..offer() };
        let asked =
            [(option::INFO, go("", &[]), 30), (option::GO, go("", &[]), 30), (option::EXPORT_NAME, Vec::new(), 8)];
        for (number, content, at) in asked {
            let flags = [false, true].map(|structured| {
                let mut negotiation = greeted();
                if structured {
                    negotiation.advance(&offer, &option(option::STRUCTURED_REPLY, b""), &mut Vec::new());
                }
                let mut out = Vec::new();
                negotiation.advance(&offer, &option(number, &content), &mut out);
                u16::from_be_bytes([out[at], out[at + 1]])
            });
            assert_eq!(flags.map(|flags| flags & SEND_DF), [0, SEND_DF], "option {number}");
            assert_eq!(flags[0] | SEND_DF, flags[1]);
        }
    }
}

#[test]
fn options_are_answered() {
    use option_reply::{ACK, ERR_INVALID, ERR_UNKNOWN, ERR_UNSUP, INFO, META_CONTEXT, SERVER};
    let check = |number: u32, content: &[u8], structured: bool, expected: &[u32]| {
        let mut negotiation = greeted();
        negotiation.agreed.structured = structured;
        let mut out = Vec::new();
        let bytes = option(number, content);
        let progress = negotiation.advance(&offer(), &bytes, &mut out);
        assert_eq!(kinds(&out), expected, "option {number}, {content:?}");
        (progress, bytes.len())
    };
    check(option::LIST, b"", false, &[SERVER, ACK]);
    check(option::LIST, b"x", false, &[ERR_INVALID]);
    check(option::STRUCTURED_REPLY, b"", false, &[ACK]);
    check(option::STRUCTURED_REPLY, b"x", false, &[ERR_INVALID]);
    // TLS is not offered: the socket is local.
    check(5, b"", false, &[ERR_UNSUP]);
    check(99, b"anything", false, &[ERR_UNSUP]);
    check(option::INFO, &go("disk", &[]), false, &[INFO, INFO, ACK]);
    check(option::INFO, &go("", &[info::NAME, info::BLOCK_SIZE]), false, &[INFO, INFO, INFO, ACK]);
    check(option::INFO, &go("other", &[]), false, &[ERR_UNKNOWN]);
    check(option::INFO, &go("disk", &[])[1..], false, &[ERR_INVALID]);
    check(option::INFO, &[&go("disk", &[])[..], b"x"].concat(), false, &[ERR_INVALID]);
    let (progress, used) = check(option::GO, &go("disk", &[]), true, &[INFO, INFO, ACK]);
    assert_eq!(progress, Progress::Agreed(used, Agreed { structured: true, base_allocation: false }));
    check(option::SET_META_CONTEXT, &contexts("disk", &[BASE_ALLOCATION]), false, &[ERR_INVALID]);
    check(option::SET_META_CONTEXT, &contexts("disk", &[BASE_ALLOCATION]), true, &[META_CONTEXT, ACK]);
    check(option::SET_META_CONTEXT, &contexts("disk", &["base:", "qemu:x"]), true, &[ACK]);
    check(option::LIST_META_CONTEXT, &contexts("disk", &["base:"]), true, &[META_CONTEXT, ACK]);
    check(option::LIST_META_CONTEXT, &contexts("disk", &[]), true, &[META_CONTEXT, ACK]);
    check(option::LIST_META_CONTEXT, &contexts("other", &[]), true, &[ERR_UNKNOWN]);
    let mut endless = contexts("disk", &[]);
    let count = endless.len() - 4;
    endless[count..].copy_from_slice(&u32::MAX.to_be_bytes());
    check(option::LIST_META_CONTEXT, &endless, true, &[ERR_INVALID]);
    assert_eq!(check(option::ABORT, b"", false, &[ACK]).0, Progress::Over);
}

#[test]
fn what_breaks_the_rules_ends_it() {
    let mut out = Vec::new();
    let mut over = |bytes: &[u8]| assert_eq!(greeted().advance(&offer(), bytes, &mut out), Progress::Over);
    over(&[0; 16]);
    over(&option(option::EXPORT_NAME, b"other"));
    let mut oversize = option(option::LIST, b"");
    oversize[12..].copy_from_slice(&(OPTION_MAX as u32 + 1).to_be_bytes());
    over(&oversize);
    let unknown_flags = Negotiation::default().advance(&offer(), &4_u32.to_be_bytes(), &mut out);
    assert_eq!(unknown_flags, Progress::Over);
    assert!(out.is_empty());
}

#[test]
fn the_old_way_to_begin() {
    for (flags, size) in [(1_u32, 134), (3, 10)] {
        let (mut negotiation, mut out) = (Negotiation::default(), Vec::new());
        negotiation.advance(&offer(), &flags.to_be_bytes(), &mut out);
        let bytes = option(option::EXPORT_NAME, b"");
        let progress = negotiation.advance(&offer(), &bytes, &mut out);
        assert_eq!(progress, Progress::Agreed(bytes.len(), Agreed::default()));
        assert_eq!(out.len(), size);
        assert_eq!(out[..8], offer().size.to_be_bytes());
    }
}

proptest! {
    /// Whatever comes: no panic, never more used than there is, and answers that are whole.
    #[test]
    fn any_option(number in 0_u32..12, content in prop::collection::vec(any::<u8>(), 0..64), cut in 0_usize..80) {
        let bytes = option(number, &content);
        let mut negotiation = greeted();
        let mut out = Vec::new();
        if cut < bytes.len() {
            prop_assert_eq!(negotiation.advance(&offer(), &bytes[..cut], &mut out), Progress::Starved);
            prop_assert!(out.is_empty());
        }
        match negotiation.advance(&offer(), &bytes, &mut out) {
            Progress::Used(used) => {
                prop_assert_eq!(used, bytes.len());
                prop_assert!(!kinds(&out).is_empty());
            }
            Progress::Agreed(used, _) => prop_assert_eq!(used, bytes.len()),
            Progress::Over => {}
            Progress::Starved => prop_assert!(false, "it was whole"),
        }
    }
}
