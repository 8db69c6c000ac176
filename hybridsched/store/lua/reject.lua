-- Drop a claimed entry that cannot be run because it is not what accept.lua writes, and say so to its client.
--
-- KEYS 1 the hash of the id that it names   2 its stream   3 and more: the reply streams that it names
-- ARGV 1 consumer   2 entry id   3 why, used where this script finds nothing wrong with it
--      4 how long the result is kept, ms   5 life of the reply stream after this, ms   6 its MAXLEN
-- Returns 1 dropped | 0 no longer the caller's.
--@include entries
--@include answer
--@include unreadable

local keys = {req = KEYS[1], stream = KEYS[2], replies = {}}
for i = 3, #KEYS do
  keys.replies[i - 2] = KEYS[i]
end
if not held_by(keys.stream, ARGV[2], ARGV[1], 0) then
  return 0
end
local entry = redis.call('XRANGE', keys.stream, ARGV[2], ARGV[2])[1]
local flat = entry and entry[2] or {}
drop_unreadable(keys, ARGV[2], flat, unreadable(fields_of(flat)) or ARGV[3],
  {keep_ms = ARGV[4], reply_ttl_ms = ARGV[5], maxlen = ARGV[6]})
return 1
