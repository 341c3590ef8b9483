// Azure's event processor for Go, which tells what it does in the lines that ours write.
//
//	event_processor WORKER HUB GROUP CONTAINER INTERVAL EXPIRY
//
// Both connection strings are in the environment. It ends, and gives its partitions up, at SIGTERM.
package main

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azeventhubs/v2"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azeventhubs/v2/checkpoints"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"
)

var worker string
var telling sync.Mutex

func main() {
	worker = os.Args[1]
	running, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	processor := processorOf(os.Args[2], os.Args[3], os.Args[4], seconds(os.Args[5]), seconds(os.Args[6]))
	var readers sync.WaitGroup
	go func() {
		for {
			client := processor.NextPartitionClient(running)
			if client == nil {
				return
			}
			readers.Add(1)
			go func() {
				defer readers.Done()
				read(running, client)
			}()
		}
	}()
	must(0, processor.Run(running))
	readers.Wait()
}

func processorOf(hub, group, blobs string, interval, expiry time.Duration) *azeventhubs.Processor {
	kept := must(container.NewClientFromConnectionString(os.Getenv("AZURE_STORAGE_CONNECTION_STRING"), blobs, nil))
	store := must(checkpoints.NewBlobStore(kept, nil))
	secret := os.Getenv("EVENTHUBS_CONNECTION_STRING")
	consumer := must(azeventhubs.NewConsumerClientFromConnectionString(secret, hub, group, nil))
	earliest := true
	return must(azeventhubs.NewProcessor(consumer, store, &azeventhubs.ProcessorOptions{
		UpdateInterval:              interval,
		PartitionExpirationDuration: expiry,
		StartPositions:              azeventhubs.StartPositions{Default: azeventhubs.StartPosition{Earliest: &earliest}},
	}))
}

// read hands a partition's events out until another takes it or the worker stops.
func read(running context.Context, client *azeventhubs.ProcessorPartitionClient) {
	defer client.Close(context.Background())
	shard := client.PartitionID()
	tell("initialize", shard, nil)
	for {
		waiting, enough := context.WithTimeout(running, time.Second)
		events, err := client.ReceiveEvents(waiting, 100, nil)
		enough()
		if running.Err() != nil {
			tell("stopped", shard, nil)
			return
		}
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			log.Printf("partition %s: %v", shard, err)
			tell("lease-lost", shard, nil)
			return
		}
		if len(events) > 0 {
			handle(client, shard, events)
		}
	}
}

func handle(client *azeventhubs.ProcessorPartitionClient, shard string, events []*azeventhubs.ReceivedEventData) {
	for _, event := range events {
		digest := sha1.Sum(event.Body)
		tell("record", shard, map[string]any{
			"sequence_number":     strconv.FormatInt(event.SequenceNumber, 10),
			"sub_sequence_number": 0,
			"partition_key":       nil,
			"sha1":                hex.EncodeToString(digest[:]),
		})
	}
	if err := client.UpdateCheckpoint(context.Background(), events[len(events)-1], nil); err != nil {
		log.Printf("partition %s: no checkpoint: %v", shard, err)
	}
}

func tell(event, shard string, more map[string]any) {
	line := map[string]any{"t": time.Now().UnixMilli(), "worker": worker, "event": event, "shard": shard}
	for name, value := range more {
		line[name] = value
	}
	telling.Lock()
	defer telling.Unlock()
	must(0, json.NewEncoder(os.Stdout).Encode(line))
}

func seconds(text string) time.Duration {
	return time.Duration(must(strconv.ParseFloat(text, 64)) * float64(time.Second))
}

func must[Value any](value Value, err error) Value {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
