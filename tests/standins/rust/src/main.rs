//! Serves ferrokinesis on a loopback port: `PORT SUBSCRIPTION_MS EVENT_RECORDS`.

use axum::{
    body::{Body, to_bytes},
    extract::{Request, State},
    middleware::{Next, from_fn_with_state},
    response::Response,
};
use ferrokinesis::{
    actions::subscribe_to_shard::execute_streaming,
    constants::{CONTENT_TYPE_CBOR, CONTENT_TYPE_JSON},
    create_app,
    server::cbor_to_json,
    store::{Store, StoreOptions},
};

const BODY_BYTES_MOST: usize = 16 << 20;

/// Starts a subscription where it is asked for: ferrokinesis 0.7.0 itself drops the number and the time
/// of a starting position before it looks at them, and always begins with the oldest record.
async fn subscribe(State(store): State<Store>, request: Request, next: Next) -> Response {
    let target = request.headers().get("x-amz-target").map(|value| value.as_bytes());
    if target != Some(b"Kinesis_20131202.SubscribeToShard") {
        return next.run(request).await;
    }
    let (head, body) = request.into_parts();
    let bytes = to_bytes(body, BODY_BYTES_MOST).await.unwrap_or_default();
    let kind = head.headers.get("content-type").map(|value| value.as_bytes());
    // Its events are in the form in which it was asked.
    let (question, kind) = if kind == Some(CONTENT_TYPE_CBOR.as_bytes()) {
        let read = ciborium::from_reader::<ciborium::Value, _>(&bytes[..]);
        (read.map(|value| cbor_to_json(&value)).unwrap_or_default(), CONTENT_TYPE_CBOR)
    } else {
        (serde_json::from_slice(&bytes).unwrap_or_default(), CONTENT_TYPE_JSON)
    };
    match execute_streaming(&store, question, kind).await {
        Ok(events) => Response::builder()
            .header("content-type", "application/vnd.amazon.eventstream")
            .body(events)
            .expect("a response"),
        // It refuses the same question once more, in its own words.
        Err(_) => next.run(Request::from_parts(head, Body::from(bytes))).await,
    }
}

fn number(place: usize) -> u64 {
    let text = std::env::args().nth(place).expect("PORT SUBSCRIPTION_MS EVENT_RECORDS");
    text.parse().expect("a number")
}

#[tokio::main]
async fn main() {
    let (app, store) = create_app(StoreOptions {
        create_stream_ms: 10,
        delete_stream_ms: 10,
        update_stream_ms: 10,
        shard_limit: 4000,
        subscribe_to_shard_session_ms: number(2),
        subscribe_to_shard_event_record_limit: number(3) as usize,
        ..StoreOptions::default()
    });
    let app = app.layer(from_fn_with_state(store, subscribe));
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", number(1) as u16)).await.expect("binding");
    axum::serve(listener, app).await.expect("serving");
}
