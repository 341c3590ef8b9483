// Azure's event processor for JavaScript, which tells what it does in the lines that ours write.
//
//     node worker.cjs WORKER HUB GROUP CONTAINER INTERVAL EXPIRY
//
// Both connection strings are in the environment. It ends, and gives its partitions up, at SIGTERM.
const { createHash } = require("node:crypto");
const fs = require("node:fs");
const { ContainerClient } = require("@azure/storage-blob");
const { CloseReason, EventHubConsumerClient, earliestEventPosition } = require("@azure/event-hubs");
const { BlobCheckpointStore } = require("@azure/eventhubs-checkpointstore-blob");

const [worker, hub, group, container, interval, expiry] = process.argv.slice(2);
const STDOUT = 1;

function tell(event, context, more = {}) {
  const line = { t: Date.now(), worker, event, shard: context.partitionId, ...more };
  // Written at once, whole: what is still in a buffer when the process is killed was never told.
  fs.writeSync(STDOUT, JSON.stringify(line) + "\n");
}

async function handle(events, context) {
  for (const event of events) {
    tell("record", context, {
      sequence_number: String(event.sequenceNumber),
      sub_sequence_number: 0,
      partition_key: null,
      sha1: createHash("sha1").update(event.body).digest("hex"),
    });
  }
  if (events.length > 0) await context.updateCheckpoint(events[events.length - 1]);
}

const blobs = new ContainerClient(process.env.AZURE_STORAGE_CONNECTION_STRING, container);
const client = new EventHubConsumerClient(
  group,
  process.env.EVENTHUBS_CONNECTION_STRING,
  hub,
  new BlobCheckpointStore(blobs),
  {
    loadBalancingOptions: {
      updateIntervalInMs: 1000 * Number(interval),
      partitionOwnershipExpirationIntervalInMs: 1000 * Number(expiry),
    },
  },
);
const subscription = client.subscribe(
  {
    processEvents: handle,
    processInitialize: async (context) => tell("initialize", context),
    processClose: async (reason, context) =>
      tell(reason === CloseReason.Shutdown ? "stopped" : "lease-lost", context),
    processError: async (error, context) => console.error(new Date().toISOString(), context.partitionId, error),
  },
  { startPosition: earliestEventPosition, skipParsingBodyAsJson: true, maxBatchSize: 100, maxWaitTimeInSeconds: 1 },
);
process.once("SIGTERM", async () => {
  await subscription.close();
  await client.close();
});
