//! Any bytes are decoded or refused, and what was decoded is encoded as it came.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rmap::wire::copy::CopyOrder;
use rmap::wire::datagram::Head;
use rmap::wire::message::Message;
use rmap::wire::report::Report;

fuzz_target!(|bytes: &[u8]| {
    let _ = Message::decode(bytes);
    if let Ok(head) = Head::decode(bytes) {
        assert_eq!(Head::decode(&[&head.encode()[..], &bytes[head.encode().len()..]].concat()), Ok(head));
    }
    if let Ok(report) = Report::decode(bytes) {
        assert_eq!(report.encode(), bytes);
    }
    if let Ok(order) = CopyOrder::decode(bytes) {
        assert_eq!(CopyOrder::decode(&order.encode()), Ok(order));
    }
});
