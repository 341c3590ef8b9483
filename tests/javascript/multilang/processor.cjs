// A processor of aws-kcl: it says each record on standard error, and checkpoints behind each batch and at each end.
const kcl = require("aws-kcl");

let shard = "";

function checkpointed(input, number, done) {
  const heard = (error) => {
    if (error) process.stderr.write(`WARN checkpoint ${error}\n`);
    done();
  };
  if (number) input.checkpointer.checkpoint(number, heard);
  else input.checkpointer.checkpoint(heard);
}

kcl({
  initialize: (input, done) => {
    shard = input.shardId;
    done();
  },
  processRecords: (input, done) => {
    for (const { partitionKey, sequenceNumber, subSequenceNumber } of input.records)
      process.stderr.write(`Record ${partitionKey} ${sequenceNumber} ${subSequenceNumber};\n`);
    const last = input.records.at(-1);
    // This library names a record by its number alone, which means the first of an aggregate.
    if (last) checkpointed(input, last.sequenceNumber, done);
    else done();
  },
  leaseLost: (_input, done) => done(),
  shardEnded: (input, done) => {
    process.stderr.write(`Shard ${shard} has ended\n`);
    checkpointed(input, null, done);
  },
  shutdownRequested: (input, done) => checkpointed(input, null, done),
}).run();
