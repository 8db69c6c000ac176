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
local record = redis.pcall('HGET', KEYS[4], ARGV[1])
local _, _, _, _, said, rest = string.match(type(record) == 'string' and record or '', FIELDS)
local place = rest and place_of(rest, now)
write_replica(KEYS[4], ARGV[1], now + tonumber(ARGV[5]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]),
  said == '1' and 1 or 0, place and place.text)
return string.format('%.3f', now)
