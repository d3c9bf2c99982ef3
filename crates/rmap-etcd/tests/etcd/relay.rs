//! Stands between a client and etcd and loses answers: the request arrives, and nobody is told.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

pub struct Relay {
    pub endpoint: String,
    plan: Arc<Mutex<Plan>>,
}

/// Answers that still pass, then answers that are lost.
#[derive(Default)]
struct Plan {
    pass: u32,
    lose: u32,
}

impl Plan {
    fn passes(&mut self) -> bool {
        if self.pass > 0 {
            self.pass -= 1;
            return true;
        }
        let loses = self.lose > 0;
        self.lose -= u32::from(loses);
        !loses
    }
}

impl Relay {
    /// Its threads end with the process.
    pub fn before(etcd: &str) -> Relay {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let endpoint = listener.local_addr().expect("its address").to_string();
        let plan = Arc::<Mutex<Plan>>::default();
        let (etcd, losing) = (etcd.to_owned(), Arc::clone(&plan));
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(&etcd)) else { continue };
                let (to, from) = (near.try_clone().expect("a copy"), far.try_clone().expect("a copy"));
                std::thread::spawn(move || carry(near, far, || true));
                let losing = Arc::clone(&losing);
                std::thread::spawn(move || carry(from, to, || losing.lock().unwrap().passes()));
            }
        });
        Relay { endpoint, plan }
    }

    /// After `pass` answers, the next `count` do not come.
    pub fn lose(&self, pass: u32, count: u32) {
        *self.plan.lock().unwrap() = Plan { pass, lose: count };
    }

    pub fn is_done(&self) -> bool {
        self.plan.lock().unwrap().lose == 0
    }
}

/// Until one side ends, or what came is not to be passed on.
fn carry(mut from: TcpStream, mut to: TcpStream, mut passes: impl FnMut() -> bool) {
    let mut bytes = vec![0; 1 << 16];
    loop {
        let count = from.read(&mut bytes).unwrap_or(0);
        if count == 0 || !passes() || to.write_all(&bytes[..count]).is_err() {
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            return;
        }
    }
}
