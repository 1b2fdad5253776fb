"""English words that RULER's tasks draw from: adjectives and nouns for keys, and all of them for lists of words."""

from __future__ import annotations

from ..record import WORDS as NOUNS

ADJECTIVES = """
able absent active adult aerial agile airy alert alien alive almond ample ancient angry annual anxious apt arctic arid
ashen astute atomic austere average awake aware awful azure bald bare basic bashful bent best better big bitter bland
blank bleak blind blond blue blunt bold bony boring bossy bouncy brainy brave brief bright brisk brittle broad broken
bronze brown bumpy busy calm candid capable careful careless casual caring certain charming chatty cheap cheerful chilly
chubby civic civil classic clean clear clever close cloudy clumsy coarse cold comfy common compact complex concrete
content cool costly cozy crafty crazy creamy creepy crimson crisp crooked cruel crunchy cryptic curious curly curved
cute damp daring dark dazzling dear decent deep defiant delicate dense dental dim dire dirty discreet distant dizzy
domestic double drab dreary dry dual dull dusky dusty eager early earnest easy eastern edible elated elderly elegant
eminent empty endless enormous entire equal eternal ethical even exact exotic expert extra faint fair faithful false
familiar famous fancy far fast fatal faulty feeble fertile festive few fierce final fine firm fiscal fit fixed flaky
flat fleet flimsy floral fluent fluffy fluid fond foolish foreign formal forlorn fragile frail frank free frequent fresh
friendly frigid frosty frozen frugal full fumbling funny furry fuzzy gaudy general generous gentle genuine giddy gifted
glad gleaming global gloomy glorious glossy golden good graceful grand grateful grave gray greasy great greedy green
grim groovy gross grown gruff grumpy guilty gusty hairy half handmade handsome handy happy hard harmless harsh hasty
healthy heavy helpful hidden high hollow homely honest hopeful hot huge humble humid hungry hushed husky icy ideal idle
immense impish inborn inner innocent intact intense jagged jaunty jealous joint jolly jovial joyful juicy jumbo junior
just keen kind known lame lanky large last late lavish lazy lean legal level light likely lime limp linear literate
little lively local lofty lonely long loose lost loud lovely low loyal lucid lucky lumpy lunar lush mad magic magnetic
main major mature meager mean measly medical mellow merry messy mighty mild milky minor modern modest moist moral muddy
musical muted narrow nasal native natural naval near neat needy nervous neutral new next nice nimble noble noisy normal
north novel numb nutty oblong odd old open optimal oral ordinary ornate outer oval overt pale past patient perfect
petite placid plain plump plush polite poor portable posh precious precise pretty prime prior private proper proud
public pure purple quaint quick quiet radiant random rapid rare raw ready real recent red regal regular remote rich
rigid ripe rocky rosy rotten rough round royal rude rugged rural rustic rusty sacred sad safe salty sane scarce scary
secret secure selfish serene severe shabby shady shallow sharp shiny short shrill shy silent silky silly simple sincere
single skilled sleek sleepy slender slim slimy slow sly small smart smoky smooth snug sober social soft solar solemn
solid sore sour southern spare sparse spicy spiky spotless stale stark steady steep sterile stern stiff still strange
strict strong stuffy sturdy subtle sudden sunny super sure sweet swift tacit tall tame tan tangy tart tasty tender tense
tepid thick thin thirsty thorny thrifty tidy tight timely tiny tired torn total tough tranquil trendy tricky trim
tropical true trusty tubby typical ugly unique unkempt untidy upbeat upper upset urban urgent useful usual vacant vague
vain valid vast verbal vexed vibrant violet virtual visible vital vivid vocal void warm wary watery wavy weak wealthy
weary weird western wet whole wide wild windy wise witty woeful wooden woolly worldly worried worthy wry yearly yellow
young zany zealous zesty
""".split()

VERBS = """
abandon absorb accept accuse achieve acquire adapt add adjust admire admit adopt advise afford agree allow alter amuse
analyse announce annoy answer apologise appear applaud apply appoint approve argue arise arrange arrest arrive ask
assemble assert assess assign assist assume assure attach attack attempt attend attract avoid awaken balance ban bathe
beat become beg begin behave believe belong bend betray bind bite blame bleed bless blink blush boast boil borrow bounce
bow breathe breed bring build bully burn burst bury buy calculate call cancel carve cast catch cause celebrate challenge
change charge chase cheat cheer chew choke choose chop claim clap clean cling close coach collapse collect combine come
command compare compete complain complete compose conceal concern conduct confess confirm confuse connect consider
consist consult consume contain continue contribute convert convince cook cope copy correct cough count cover crack
crash crawl create creep cross crush cry cure curse cut damage dare deal decay deceive decide declare decorate decrease
defeat defend define delay delight deliver demand deny depart depend deposit describe deserve destroy detect develop
devote die differ dig digest dip direct disagree discover discuss dislike dismiss display dissolve distribute disturb
dive divide donate doubt drag drain dream drift drink drive drop drown earn eat educate elect eliminate embrace emerge
employ enable encourage endure enforce enjoy enlarge ensure enter entertain erase escape establish estimate evaluate
evolve examine exceed exchange excite excuse exist expand expect explain explode explore export express extend fade fail
fall fasten feed feel fetch fight fill find finish flash flee flicker float flood flow fly fold follow forbid force
forget forgive form freeze frighten frown fry fulfil gain gather gaze generate get give glance glow glue govern grab
grant greet grind grip groan grow grumble guard guess guide hang happen harm harvest hate haunt heal hear heat help
hesitate hide hire hit hold hope hug hum hunt hurry identify ignore illustrate imagine imply import impress improve
include increase indicate infect influence inform inject injure inspect inspire install instruct insult insure intend
interfere interrupt introduce invade invent invest invite isolate jog join joke juggle jump justify keep kick kill kiss
kneel knit knock know label land laugh launch lay lead leak learn leave lend let lick lie lift like limit link list
listen live load locate long look loosen lose love lower maintain make manage march mark marry match matter measure melt
memorise mend mention milk mislead miss mix moan mock modify mourn move multiply murmur name need neglect negotiate nod
note notice obey object observe obtain occupy occur offend offer omit operate oppose order organise overcome owe own
pack paddle park participate pass paste pause pay peel perform permit persuade pick pinch place plan play plead please
plough plug point poke polish possess post pour praise pray predict prefer prepare present preserve press pretend
prevent produce promise promote pronounce propose protect prove provide publish pull pump punch punish purchase push
puzzle quit race raise reach react read realise rebuild recall receive recite recognise recommend recover recycle reduce
refer reflect refuse regret reject relate relax release rely remain remember remind remove rent repair repeat replace
reply report represent request require rescue resemble resign resist resolve respond rest restore restrict result retire
retreat return reveal reverse revise reward ride rinse rise risk roar rob roll rot row rub ruin rule run rush satisfy
save say scatter scold scrape scratch scream scrub seal search see seek seem seize select sell send separate serve
settle sew shake shape share shave shed shelter shift shine shiver shock shoot shop shout show shrink shrug shut sigh
sing sink sit skate ski skip slap sleep slice slide slip smash smell smile snatch sneeze sniff snore solve sort sound
sparkle speak spell spend spill spin spit split spoil spread sprinkle squash squeak squeeze stain stand stare start stay
steal steer step stick sting stir stitch stop store stretch strike strip struggle study succeed suck suffer suggest suit
supply support suppose surprise surround survive suspect suspend swallow swear sweep swell swim swing switch tackle take
talk tap taste teach tear tease tell tempt test thank thaw think threaten throw tickle tie tip touch tow trace trade
translate transport trap travel treat tremble trick trot trust try tug tumble turn twist type understand undo unite
unlock unpack untie upgrade use utter vanish vary visit vote wait walk wander want warn wash waste watch wave wear weave
weep weigh welcome whine whip whisper win wink wipe wish wonder work worry wrap wreck wrestle wriggle write yawn yell
yield zip zoom
""".split()

# Besides `record.WORDS`, so that a list of 32k tokens has enough of them.
MORE_NOUNS = """
ability abbey abyss accent accident account acid acre actress adult advice affair agency agenda agent airport alarm
album alcohol algebra alphabet ambition amount analogy anatomy ancestor angel angle animal answer antique anvil anxiety
apartment appetite appliance apprentice aquarium archer area arena argument army aroma arrival article artist aspect
asset athlete atlas atom attempt audience author avenue award axis baby bachelor bacon bag bait balance balcony ballet
band bandage bank banquet barber bargain barracks baseball basement basin bat battery battle bay beam beard beast beauty
bed bedroom bee beetle bike bill biology birth birthday biscuit bishop bit blade blizzard block blood blouse body bolt
bomb bone bonus border boss botany boundary boy bracelet brain brake brand breakfast breath breed bride broth bubble
bucket bud buddy budget bug bulb bull bullet bundle burden bureau burger burial bus bust butler cabbage cabinet cage
calendar calf camera campus canary cancer candy cannon canyon cap cape capital car caramel caravan card career cargo
carriage cartoon cash casino cause ceiling cell cement census cent center century cereal ceremony champion chance
channel chapter charcoal charity charm chart cheek cheese chef chemist chicken chief child chimp chin chip choice choir
cinema citizen clarinet class clerk client climate clinic cobra cockpit code coil college colony color column comedy
comment committee community company concept concert condition conflict congress consent contest context contract
contrast convoy copy core cork corner corridor cost costume cottage council counter country county couple courage course
court cow cowboy crab craft crate crayon creature credit creek crew crib crime crisis critic crocodile crop crowd cube
cuff culture cupboard curtain curve cushion custom cycle cylinder data date daughter dawn day dean debate debt decade
decimal decision defect degree delay delta dentist depth deputy design dessert detail device dial dialect diary dice
diet dinosaur diploma disease dish disk distance district divorce dock document doll dollar domain donor dose doubt
dozen draft drama driver drought dump duty dwarf dye dynasty earring ecology economy edge edition editor effect effort
egg ego election element elephant elevator email embassy emblem emotion emperor empire employee enemy energy entrance
envelope episode era error essay estate event evidence exam example exit expense expert extent eye fabric face fact
factory failure faith fame family fan fashion fat fate fault favor fear feature fee fellow fiction figure film filter
finance fish flavor flesh flight flock floor flour flu foam focus folk food foot football fortune forum fossil
foundation fraction fragrance freedom freight freighter fridge fuel function fund funeral fur furnace future galaxy
gallery game gang garage gas gasoline gear gem gender gene genius genre gentleman geology girl glance glue goal god
goddess golf gorilla gossip gown grade grain grandma graph grave grocery group growth guest guild guilt gum gun gym
habit hair hall ham hand handle harvest head health hearing heaven height hero heroine hip history hobby hockey holiday
home honor hood horizon host hospital hour humor hunter hurricane husband hut hygiene idea idol illness image impact
income index industry infant inn insect inside insight inspector instance institute insurance intent interest interval
invention item jaguar jail jam jaw jazz jeans jelly jet job joint journal journey joy juice jungle jury justice kangaroo
kayak ketchup kidney kilometer kindness kingdom kiosk kitten knight knot knowledge label labor laboratory lace lack
landlord lane language laptop law lawyer layer leader leaf league leather lecture leg legend leisure lens lesson level
liberty library license lid life limb line lip liquid list literature liver loaf loan lobby lobster location logic
lounge lunch lung luxury machine magazine magician magnet maid mail mammal man mango manner manor map marathon margin
mass master mat material matter mayor maze meal meaning meat medal media medicine member memory menu merchant mercy
merit message metal meter method midnight mile military mind mineral minimum minister minute miracle mission mistake
mixture mob mode moment money monster month mood moral mortgage mosque motel motion motor mouth movie mud muffin mug
muscle museum mushroom music myth nation nature neck neighbor nephew nerve network neuron newspaper niece noise noodle
noon nose notebook nothing notion nurse nut oath object ocean offer office officer oil omelet opera opinion option orbit
orchid organ origin outcome outfit outlet outline oven owner oxygen package page pair pan panda panel panic pants
paradise paragraph parent park part partner party passenger pasta patent patrol pattern pause payment peace peak peanut
pedal pen penguin pension people percent period permit person pet phase philosophy phone photo phrase physics pie piece
pig pill pilot pin pint pirate pit pizza plant plastic plate platform player plaza pleasure plot plumber poet point
poison pole police policy politics poll pony pool pope population pork porter portion portrait post pot pottery pound
poverty powder power practice prayer preface price pride priest prison prize problem process product profit program
project proof property proposal protein protest province psychology pub pudding pulse pump pupil puppet puppy purpose
purse puzzle pyramid quality quantity quartz question quota rabbi raccoon race rack radar radio radish rail range rank
rat rate ratio razor reason rebel receipt recipe record reform region relic relief religion rent report republic resort
result revenue review rhythm rib riddle rifle riot risk ritual robe robot rocket rod role roll romance rope route rug
ruler rumor sack safety saint sake salad salary sample sandal sandwich sauce sausage saxophone scale scandal scene
schedule scheme scholar science scissors scope score scout screen screw script sculpture seafood season seat second
secretary section sector senate senior sense sentence series sermon servant session shade shadow shame shape shark shelf
sheriff shield shirt shore shoulder shower shrimp sibling side sign signal silence singer sink site size skeleton skill
skin skull slave sleeve slice slogan smell smile smoke snack snail snake society sock soda sofa software soil son song
soul soup source space spark species speech speed sphere spice spider spinach spirit sponge sport spot squad squid
squirrel staff stage stake stamp standard status steak steam steel stem stereo stew stick stomach strategy stranger
strawberry stream strength stress string structure student studio style subject suburb subway success suit suitcase
summit surface surgeon surgery surplus survey suspect sweater sword symbol symptom syrup system tablet tale talent tank
tape target task tavern tax taxi teacher team tear technique telephone temper temperature tenant tennis tension tent
term terrace territory terror text texture theater theme theory thesis thief thigh thing thought thread throat thumb
ticket tide tie tile timber time tissue title toast tobacco toe toilet tomato tomb ton tone tongue tool tooth topic
torch tornado tortoise total tourist towel toy track tractor trade tradition tragedy trail trait transit trash treasure
treaty trend trial tribe trick trio trolley troop trophy trouble truck trunk truth tube tuna turkey twig twin type
tyrant uncle uniform union unit universe user utensil vacation vaccine valve van vanilla vault vegetable vehicle vein
vendor venture verb verse vessel veteran victim victory video view villa villain vine vinegar virtue virus vision
visitor voice volcano volume vote voyage wage waist waiter wallet war wardrobe warehouse warrior wave wax way wealth
weapon weather wedding weed week weight west whale whisker widow width wife wine wing winner wire wisdom witness wizard
woman wonder word worker workshop world worm wound wreath wrist writer yacht year yolk youth zebra zinc zone zoo
""".split()

ALL = sorted({*NOUNS, *MORE_NOUNS, *ADJECTIVES, *VERBS})
