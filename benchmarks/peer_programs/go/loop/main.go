// Reads the shards of `canned` one after the other, without leases: loop URL
package main

import (
	"context"
	"log"
	"os"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/kinesis"
	"github.com/aws/aws-sdk-go-v2/service/kinesis/types"
)

func main() {
	now, stream := context.Background(), aws.String("canned")
	client := kinesis.New(kinesis.Options{
		BaseEndpoint: aws.String(os.Args[1]),
		Region:       "eu-west-1",
		Credentials:  credentials.NewStaticCredentialsProvider("demo", "demo", ""),
	})
	var places []*string
	for _, shard := range must(client.ListShards(now, &kinesis.ListShardsInput{StreamName: stream})).Shards {
		asked := kinesis.GetShardIteratorInput{
			StreamName: stream, ShardId: shard.ShardId, ShardIteratorType: types.ShardIteratorTypeTrimHorizon,
		}
		places = append(places, must(client.GetShardIterator(now, &asked)).ShardIterator)
	}
	for bytes := 0; bytes >= 0; {
		for _, place := range places {
			for _, each := range must(client.GetRecords(now, &kinesis.GetRecordsInput{ShardIterator: place})).Records {
				bytes += len(each.Data)
			}
		}
	}
}

func must[Value any](value Value, err error) Value {
	if err != nil {
		log.Fatal(err)
	}
	return value
}
