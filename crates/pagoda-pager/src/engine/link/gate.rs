//! Whether the shim's gate is open: what the agent was asked, and who waits for its answer.
//!
//! A question ends with the agent's answer or with its connection. A shim that does not know the question breaks the connection.

use std::sync::mpsc::Sender;

use crate::handle::GateAnswer;

/// Questions that the agent has not answered.
#[derive(Debug, Default)]
pub struct GateQuestions(Vec<Question>);

#[derive(Debug)]
struct Question {
    seq: u64,
    open: bool,
    asker: Sender<GateAnswer>,
}

impl GateQuestions {
    /// The agent is asked to open or shut the gate, by a packet of this number.
    pub fn begin(&mut self, seq: u64, open: bool, asker: Sender<GateAnswer>) {
        self.0.push(Question { seq, open, asker });
    }

    /// The agent says how the gate is now.
    pub fn complete(&mut self, seq: u64, open: bool) {
        for question in self.0.extract_if(.., |question| question.seq == seq) {
            let answer = if question.open == open { GateAnswer::Done } else { GateAnswer::Lost };
            // Who has given up waiting does not hear it.
            let _ = question.asker.send(answer);
        }
    }

    /// The connection is gone, and the gate is shut.
    pub fn lose(&mut self) {
        for question in self.0.drain(..) {
            let _ = question.asker.send(if question.open { GateAnswer::Lost } else { GateAnswer::Done });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_question_ends_with_its_answer_or_its_connection() {
        let mut questions = GateQuestions::default();
        let (asker, answers) = channel();
        for (seq, open) in [(1, true), (2, false), (3, true), (4, false)] {
            questions.begin(seq, open, asker.clone());
        }
        questions.complete(9, true);
        assert!(answers.try_recv().is_err(), "nobody asked that");
        questions.complete(2, false);
        questions.complete(1, true);
        assert_eq!([answers.recv(), answers.recv()], [Ok(GateAnswer::Done); 2]);
        questions.lose();
        assert_eq!([answers.recv(), answers.recv()], [Ok(GateAnswer::Lost), Ok(GateAnswer::Done)]);
        questions.lose();
        assert!(answers.try_recv().is_err());
    }
}
