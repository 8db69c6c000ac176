-- Say that a replica lives, with its load: claims and wakes go by these records.
--
-- KEYS 1-3 streams of the model, most urgent first   4 its replicas hash
-- ARGV 1 replica   2 load (tokens)   3 requests in flight   4 cap   5 life of the record, ms
-- Returns the server's time in ms.
--@include clock
--@include entries
--@include replicas

for class = 1, 3 do
  make_group(KEYS[class])
end
local now = clock_ms()
local record = redis.call('HGET', KEYS[4], ARGV[1])
local woken = record and string.match(record, '(%S+)$') == '1' and 1 or 0
write_replica(KEYS[4], ARGV[1], now + tonumber(ARGV[5]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), woken)
return string.format('%.3f', now)
